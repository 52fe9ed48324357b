#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- include: _atropos.lua
-- Register an environment of Atropos' protocol, once the trainer has begun, or disconnect one.
-- ARGV: 'register', desired name, max_context_len, weight, group size, min_batch_allocation or '', ttl ms, most
--       registrations since a reset
--   or  'disconnect', number
-- -> {MISSING} | {FINISHED} | {PROTOCOL} | {WAIT} | {ENVS} | {OK, number, how many of that name were before it, trainer's
--    registration...}; of 'disconnect' {UNKNOWN} | {OK}
if ARGV[1] == 'disconnect' then
  local number = ARGV[2]
  if redis.call('HEXISTS', env(number), 'group_size') == 0 then return {'UNKNOWN'} end
  redis.call('HSET', env(number), 'disconnected', 1)
  redis.call('ZADD', ENVS, 'LT', now(), number)
  emit('disconnect_env', 'env', number)
  if not write_refusal() then
    -- No piece follows, and a batch may have groups of any size.
    for _, id in ipairs(pieces_of(number)) do release(id, number) end
    redis.call('DEL', buffer(number))
  end
  return {'OK'}
end

local name, max_context_len, weight, size, share, ttl, most = unpack(ARGV, 2)

local refused = write_refusal()
if refused then return refused end
if not redis.call('HGET', ATROPOS, 'started') then return {'WAIT'} end
local number = tonumber(redis.call('HGET', ATROPOS, 'envs') or 0)
if number >= tonumber(most) then return {'ENVS'} end
local at = now()
redis.call('HSET', ATROPOS, 'envs', number + 1)
redis.call('HSET', env(number), 'weight', weight, 'min_batch_allocation', share, 'registered_ms', at,
  'max_context_len', max_context_len, 'group_size', size)
redis.call('ZADD', ENVS, at + ttl, number)
emit('register_env', 'env', number, 'name', name)
return {'OK', number, redis.call('HINCRBY', NAMES, name, 1) - 1, redis.call('HGETALL', ATROPOS)}
