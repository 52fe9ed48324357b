#!lua flags=allow-oom
-- include: _keys.lua
-- Hand out up to `count` permits: rows that came back first, then new ones, as far as the run's capacity goes.
-- A holder that is registered with a weight holds no more of them than its share among the live environments' weights.
-- Capacity: accepted + permits out < min(version step + 1 + max staleness, training steps) x groups per step;
-- nothing before a trainer took the run and recorded a version.
-- ARGV: holder, count, ttl ms, environment's ttl ms
-- -> {MISSING} | {PROTOCOL} | {OK, state, version incarnation|'', version step|'', group id...}
local holder, count, ttl, env_ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local current = state()
if not current then return {'MISSING'} end
if redis.call('HGET', RECORD, 'protocol') ~= 'gristmill' then return {'PROTOCOL'} end
local facts = redis.call('HMGET', RECORD, 'version_incarnation', 'version_step', 'max_staleness', 'training_steps',
  'groups_per_step')
local answer = {'OK', current, facts[1], facts[2]}
if current ~= 'open' or not facts[1] then return answer end

local at = now()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', PERMITS, '-inf', at)) do
  redis.call('ZREM', PERMITS, id)
  redis.call('HDEL', HOLDERS, id)
  redis.call('ZADD', REISSUE, string.sub(id, 2), id)
end

-- Who looks for what holds the run up wants to know; but a write is an fsync, and requests may be many.
if at - (redis.call('HGET', COUNTERS, 'asked_ms') or 0) >= 1000 then redis.call('HSET', COUNTERS, 'asked_ms', at) end

local steps = math.min(facts[2] + 1 + facts[3], tonumber(facts[4]))
local accepted = tonumber(redis.call('HGET', COUNTERS, 'accepted') or 0)
local out = redis.call('ZCARD', PERMITS)
local free = steps * facts[5] - accepted - out

-- The holder's part of what may be out at all, when it has a weight.
local function share()
  if not redis.call('ZSCORE', ENVS, holder) then return math.huge end
  redis.call('ZADD', ENVS, at + env_ttl, holder) -- who asks for work lives
  local own = tonumber(redis.call('HGET', env(holder), 'weight'))
  if not own then return math.huge end
  local sum = 0
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', ENVS, '(' .. at, '+inf')) do
    sum = sum + (tonumber(redis.call('HGET', env(name), 'weight')) or 0)
  end
  local held = 0
  for _, name in ipairs(redis.call('HVALS', HOLDERS)) do
    if name == holder then held = held + 1 end
  end
  return math.ceil((free + out) * own / sum) - held
end
free = math.min(free, share())
for _ = 1, math.min(count, free) do
  local id = redis.call('ZPOPMIN', REISSUE)[1]
  if not id then
    id = string.format('g%08d', redis.call('HINCRBY', COUNTERS, 'rows', 1) - 1)
  end
  redis.call('ZADD', PERMITS, at + ttl, id)
  redis.call('HSET', HOLDERS, id, holder)
  answer[#answer + 1] = id
end
return answer
