#!lua flags=allow-oom
-- include: _keys.lua
-- A leased group in another form, which is smaller. Sequences of which nothing is trained may be left out of it.
-- ARGV: group id, batch id, sequences, tokens, payload
-- -> {MISSING} | {LOST} | {OK}
local id, batch_id, sequences, tokens, body = unpack(ARGV)

if not state() then return {'MISSING'} end
if redis.call('HGET', LEASED, id) ~= batch_id then return {'LOST'} end
local before = redis.call('HMGET', group(id), 'sequences', 'bytes')
redis.call('SET', payload(id), body)
redis.call('HSET', group(id), 'schema', 'group', 'bytes', #body, 'raw_bytes', #body, 'sequences', sequences, 'tokens',
  tokens)
redis.call('HINCRBY', COUNTERS, 'leased_sequences', sequences - before[1])
redis.call('HINCRBY', COUNTERS, 'leased_bytes', #body - before[2])
redis.call('HINCRBY', COUNTERS, 'bytes', #body - before[2])
redis.call('INCRBY', BYTES, #body - before[2])
return {'OK'}
