#!lua flags=allow-oom
-- include: _keys.lua
-- Register an environment, or hear that it lives.
-- ARGV: environment id, ttl ms, 'register' | 'heartbeat', weight or '', min batch allocation or ''
-- -> {MISSING} | {SUSPENDED} | {UNKNOWN} | {OK}
local id, ttl, what, weight, allocation = unpack(ARGV)

local current = state()
if not current then return {'MISSING'} end
if current == 'suspended' then return {'SUSPENDED'} end
local new = redis.call('EXISTS', env(id)) == 0
if what == 'register' then
  redis.call('HSET', env(id), 'weight', weight, 'min_batch_allocation', allocation, 'asked_ms', now())
  redis.call('HSETNX', env(id), 'registered_ms', now())
  if new then emit('env', 'env', id) end
elseif new then
  return {'UNKNOWN'}
end
redis.call('ZADD', ENVS, now() + tonumber(ttl), id)
return {'OK'}
