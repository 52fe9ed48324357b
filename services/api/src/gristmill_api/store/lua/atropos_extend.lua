#!lua flags=allow-oom
-- include: _keys.lua
-- The batch is still being sent.
-- ARGV: batch id, ttl ms
-- -> {OK} | {LOST}
if not redis.call('ZSCORE', LEASES, ARGV[1]) then return {'LOST'} end
redis.call('ZADD', LEASES, now() + ARGV[2], ARGV[1])
return {'OK'}
