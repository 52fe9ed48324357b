#!lua flags=allow-oom
-- include: _keys.lua
-- Register an environment, or record that it is alive.
-- If there are too many, the environment that has been dead the longest is removed.
-- ARGV: environment id, ttl ms, 'register' | 'heartbeat', weight or '', min batch allocation or '', most environments
-- -> {MISSING} | {PROTOCOL}: its environments register at the root | {SUSPENDED} | {UNKNOWN} | {FULL} | {OK}
local id, ttl, what, weight, allocation, most = unpack(ARGV)

local current = state()
if not current then return {'MISSING'} end
if redis.call('HGET', RECORD, 'protocol') ~= 'gristmill' then return {'PROTOCOL'} end
if current == 'suspended' then return {'SUSPENDED'} end
local new = redis.call('EXISTS', env(id)) == 0
if what == 'register' then
  if new and redis.call('ZCARD', ENVS) >= tonumber(most) then
    local longest = redis.call('ZRANGE', ENVS, 0, 0, 'WITHSCORES')
    if tonumber(longest[2]) > now() then return {'FULL'} end
    redis.call('ZREM', ENVS, longest[1])
    redis.call('DEL', env(longest[1]))
  end
  redis.call('HSET', env(id), 'weight', weight, 'min_batch_allocation', allocation, 'asked_ms', now())
  redis.call('HSETNX', env(id), 'registered_ms', now())
  if new then emit('env', 'env', id) end
elseif new then
  return {'UNKNOWN'}
end
redis.call('ZADD', ENVS, now() + tonumber(ttl), id)
return {'OK'}
