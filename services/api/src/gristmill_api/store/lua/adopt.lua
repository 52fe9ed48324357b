#!lua flags=allow-oom
-- include: _keys.lua
-- A leased group in another form, which is smaller.
-- ARGV: group id, batch id, payload
-- -> {MISSING} | {LOST} | {OK}
local id, batch_id, body = unpack(ARGV)

if not state() then return {'MISSING'} end
if redis.call('HGET', LEASED, id) ~= batch_id then return {'LOST'} end
local before = redis.call('HGET', group(id), 'bytes')
redis.call('SET', payload(id), body)
redis.call('HSET', group(id), 'schema', 'group', 'bytes', #body, 'raw_bytes', #body)
redis.call('HINCRBY', COUNTERS, 'leased_bytes', #body - before)
redis.call('HINCRBY', COUNTERS, 'bytes', #body - before)
redis.call('INCRBY', BYTES, #body - before)
return {'OK'}
