#!lua flags=allow-oom
-- include: _keys.lua
-- Claim a piece of work by name. One holder at a time has it, until its time is over; the same holder again keeps it.
-- ARGV: name, holder, ttl ms, most claims of a run
-- -> {MISSING} | {FULL} | {HELD, holder} | {OK}
local name, holder, ttl, most = unpack(ARGV)

if not state() then return {'MISSING'} end
local refused = foreign(holder)
if refused then return refused end
local at = now()
for _, over in ipairs(redis.call('ZRANGEBYSCORE', CLAIMS, '-inf', at)) do
  redis.call('HDEL', CLAIMANTS, over)
end
redis.call('ZREMRANGEBYSCORE', CLAIMS, '-inf', at)
local present = redis.call('HGET', CLAIMANTS, name)
if present and present ~= holder then return {'HELD', present} end
if not present and redis.call('ZCARD', CLAIMS) >= tonumber(most) then return {'FULL'} end
redis.call('HSET', CLAIMANTS, name, holder)
redis.call('ZADD', CLAIMS, at + tonumber(ttl), name)
return {'OK'}
