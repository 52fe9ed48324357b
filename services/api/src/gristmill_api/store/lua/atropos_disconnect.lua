#!lua flags=allow-oom
-- include: _keys.lua
-- include: _atropos.lua
-- An environment says goodbye.
-- ARGV: number
-- -> {OK} | {UNKNOWN}
if redis.call('HEXISTS', NUMBERED, ARGV[1]) == 0 then return {'UNKNOWN'} end
redis.call('SADD', DISCONNECTED, ARGV[1])
emit('disconnect_env', 'env', ARGV[1])
return {'OK'}
