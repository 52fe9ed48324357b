#!lua flags=no-writes
-- include: _keys.lua
-- Counts of a run. Constant cost whatever the length of its queue.
-- -> {} | {state, version incarnation or nil, version step or nil, ready, leased, dead, permits out, archive, environments alive,
--    age of the oldest ready group in ms or '', its step or '', now in ms, counters..., drops...}
local facts = redis.call('HMGET', RECORD, 'state', 'version_incarnation', 'version_step')
if not facts[1] then return {} end
local at = now()
local age, step = '', ''
local head = redis.call('ZRANGE', READY, 0, 0)[1]
if head then
  local oldest = redis.call('HMGET', group(head), 'at', 'step')
  age, step = at - oldest[1], oldest[2]
end
return {facts[1], facts[2], facts[3], redis.call('ZCARD', READY), redis.call('HLEN', LEASED),
  redis.call('ZCARD', DEAD), redis.call('ZCARD', PERMITS), redis.call('LLEN', ARCHIVE),
  redis.call('ZCOUNT', ENVS, '(' .. at, '+inf'), age, step, at, redis.call('HGETALL', COUNTERS),
  redis.call('HGETALL', DROPS)}
