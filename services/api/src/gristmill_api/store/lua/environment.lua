#!lua flags=allow-oom
-- include: _keys.lua
-- Register an environment of /v1, record that it is alive, or unregister it: then its share of permits is free.
-- Environments of Atropos' protocol are registered by atropos_env.lua.
-- If there are too many, the environment that has been dead the longest is removed.
-- ARGV: environment id, 'register' | 'heartbeat' | 'unregister', ttl ms, weight or '', seconds between its
--       heartbeats or '', most environments, word of the process that registers
-- -> {MISSING} | {PROTOCOL}: its environments register at the root | {SUSPENDED}, unless unregistering | {UNKNOWN} | {FULL} | {OK}
local id, what, ttl, weight, heartbeat, most, word = unpack(ARGV)

local current = state()
if not current then return {'MISSING'} end
if redis.call('HGET', RECORD, 'protocol') ~= 'gristmill' then return {'PROTOCOL'} end
if current == 'suspended' and what ~= 'unregister' then return {'SUSPENDED'} end
local known = redis.call('EXISTS', env(id)) == 1
if not known and what ~= 'register' then return {'UNKNOWN'} end
local refused = foreign(id)
if refused and (what ~= 'register' or refused[3] > 0) then return refused end
if what == 'unregister' then
  redis.call('ZREM', ENVS, id)
  redis.call('DEL', env(id))
  publish('permits')
  return {'OK'}
end
if what == 'register' then
  if not known and redis.call('ZCARD', ENVS) >= tonumber(most) then
    local longest = redis.call('ZRANGE', ENVS, 0, 0, 'WITHSCORES')
    if tonumber(longest[2]) > now() then return {'FULL'} end
    redis.call('ZREM', ENVS, longest[1])
    redis.call('DEL', env(longest[1]))
  end
  redis.call('HSET', env(id), 'weight', weight, 'heartbeat_s', heartbeat, 'word', word)
  redis.call('HSET', COUNTERS, 'registered_ms', now())
  redis.call('HSETNX', env(id), 'registered_ms', now())
  if not known then emit('env', 'env', id) end
end
redis.call('ZADD', ENVS, now() + tonumber(ttl), id)
return {'OK'}
