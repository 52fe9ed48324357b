#!lua flags=allow-oom
-- include: _keys.lua
-- An environment says goodbye.
-- ARGV: number
-- -> {OK} | {UNKNOWN}
if redis.call('HEXISTS', env(ARGV[1]), 'group_size') == 0 then return {'UNKNOWN'} end
redis.call('HSET', env(ARGV[1]), 'disconnected', 1)
redis.call('ZADD', ENVS, 0, ARGV[1])
emit('disconnect_env', 'env', ARGV[1])
return {'OK'}
