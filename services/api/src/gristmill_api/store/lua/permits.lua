#!lua flags=allow-oom
-- include: _keys.lua
-- include: _atropos.lua
-- include: _ahead.lua
-- include: _difficulty.lua
-- Hand out up to `count` permits: rows that came back first, then new ones that do not rest, as far as the run's capacity goes.
-- A holder that is registered with a weight holds no more of them than its share among the live environments' weights.
-- Capacity: _ahead.lua. Nothing before a trainer took the run and recorded a version.
-- ARGV: holder, count, ttl ms, environment's ttl ms
-- -> {MISSING} | {PROTOCOL} | {SUSPENDED} | {OK, state, version incarnation|'', version step|'', creation, group id...}
local holder, count, ttl, env_ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local current = state()
if not current then return {'MISSING'} end
if redis.call('HGET', RECORD, 'protocol') ~= 'gristmill' then return {'PROTOCOL'} end
local refused = foreign(holder)
if refused then return refused end
local facts = redis.call('HMGET', RECORD, 'version_incarnation', 'version_step', 'creation')
local answer = {'OK', current, facts[1], facts[2], facts[3]}
if current == 'suspended' then return {'SUSPENDED'} end
if current ~= 'open' or not facts[1] then return answer end

local at = now()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', PERMITS, '-inf', at)) do reissue(id) end

-- For the run's status. At most once per second, because each write is an fsync and requests may be many.
if at - (redis.call('HGET', COUNTERS, 'asked_ms') or 0) >= 1000 then redis.call('HSET', COUNTERS, 'asked_ms', at) end

local out = redis.call('ZCARD', PERMITS)
local needed = needed_groups()
local free = needed and needed > 0 and math.max(0, most_out(needed) - out) or 0

local registered = redis.call('ZSCORE', ENVS, holder)
if registered then touch(holder, at, env_ttl, env_ttl / 10) end

-- How many more permits a holder with a weight may have: its part of all that may be out.
local function share()
  local own = registered and tonumber(redis.call('HGET', env(holder), 'weight'))
  if not own then return math.huge end
  local sum = 0
  for _, name in ipairs(alive(at)) do
    sum = sum + (tonumber(redis.call('HGET', env(name), 'weight')) or 0)
  end
  local held = 0
  for _, name in ipairs(redis.call('HVALS', HOLDERS)) do
    if name == holder then held = held + 1 end
  end
  return math.ceil((free + out) * own / sum) - held
end
for _ = 1, math.min(count, free, share()) do
  local id = redis.call('ZRANGE', REISSUE, 0, 0)[1]
  if id then
    leave_reissue(id)
  else
    id = string.format('g%08d', issue_number())
  end
  redis.call('ZADD', PERMITS, at + ttl, id)
  redis.call('HSET', HOLDERS, id, holder)
  answer[#answer + 1] = id
end
local beyond = redis.call('ZCARD', PERMITS) - (needed or 0)
if #answer > 5 and (beyond > 0 or permits_ahead() > 0) then redis.call('HSET', COUNTERS, 'ahead', math.max(0, beyond)) end
return answer
