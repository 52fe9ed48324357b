#!lua flags=allow-oom
-- include: _keys.lua
-- include: _atropos.lua
-- An environment registers, once the trainer has begun.
-- ARGV: desired name, group size, min_batch_allocation or '', JSON of the rest, most registrations since a reset
-- -> {MISSING} | {FINISHED} | {PROTOCOL} | {WAIT} | {ENVS} | {OK, number, how many of that name were before it, trainer's registration...}
local name, size, share, facts, most = unpack(ARGV)

local no = barred()
if no then return no end
if not redis.call('HGET', ATROPOS, 'started') then return {'WAIT'} end
local number = redis.call('HLEN', NUMBERED)
if number >= tonumber(most) then return {'ENVS'} end
redis.call('HSET', NUMBERED, number, facts)
redis.call('HSET', GROUP_SIZES, number, size)
if share ~= '' then redis.call('HSET', MINIMA, number, share) end
hear(number, now(), 0)
emit('register_env', 'env', number, 'name', name)
return {'OK', number, redis.call('HINCRBY', NAMES, name, 1) - 1, redis.call('HGETALL', ATROPOS)}
