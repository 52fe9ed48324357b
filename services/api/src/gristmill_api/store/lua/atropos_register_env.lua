#!lua flags=allow-oom
-- include: _keys.lua
-- include: _atropos.lua
-- An environment registers, once the trainer has begun.
-- ARGV: desired name, max_context_len, weight, group size, min_batch_allocation or '', ttl ms, most registrations since a
--       reset
-- -> {MISSING} | {FINISHED} | {PROTOCOL} | {WAIT} | {ENVS} | {OK, number, how many of that name were before it, trainer's registration...}
local name, max_context_len, weight, size, share, ttl, most = unpack(ARGV)

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
