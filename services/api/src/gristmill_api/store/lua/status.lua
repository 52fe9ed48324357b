#!lua flags=no-writes
-- include: _keys.lua
-- Counts of a run. Constant cost whatever the length of its queue.
-- -> {} | {state, version incarnation, version step, ready, leased, trained, dead, accepted, outstanding, rows, bytes,
--    drops...}
local facts = redis.call('HMGET', RECORD, 'state', 'version_incarnation', 'version_step')
if not facts[1] then return {} end
local counts = redis.call('HMGET', COUNTERS, 'accepted', 'rows', 'bytes')
return {facts[1], facts[2] or '', facts[3] or '', redis.call('ZCARD', READY), redis.call('HLEN', LEASED),
  redis.call('HLEN', TRAINED), redis.call('ZCARD', DEAD), counts[1] or 0, redis.call('ZCARD', PERMITS),
  counts[2] or 0, counts[3] or 0, redis.call('HGETALL', DROPS)}
