#!lua flags=allow-oom
-- include: _keys.lua
-- These fates are in the run's drops.jsonl, or no process archives: they go, oldest first.
-- ARGV: value of the archiver's lease, fates
-- -> {MISSING} | {FENCED} | {OK}
if not state() then return {'MISSING'} end
if redis.call('GET', ARCHIVER) ~= ARGV[1] then return {'FENCED'} end
redis.call('LPOP', FATES, ARGV[2])
return {'OK'}
