#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- include: _atropos.lua
-- The batch was sent whole, so its step has begun. An expired batch is acked too if none of its groups was leased
-- since.
-- ARGV: batch id, archive '1'|''
-- -> {OK, step} | {ALREADY} | {LOST}
local id, archive = ARGV[1], ARGV[2]

if redis.call('ZSCORE', ACKED, id) then return {'ALREADY'} end
if redis.call('ZREM', LEASES, id) == 0 and redis.call('SREM', EXPIRED, id) == 0 then return {'LOST'} end
local members = redis.call('LRANGE', batch(id), 0, -1)
for _, member in ipairs(members) do train(member, archive) end
redis.call('DEL', batch(id))
redis.call('ZADD', ACKED, now(), id)
redis.call('ZREMRANGEBYRANK', ACKED, 0, -4097)
emit('ack', 'batch', id, 'groups', #members)
if archive == '1' then tell('archive') end
return {'OK', redis.call('HINCRBY', ATROPOS, 'step', 1)}
