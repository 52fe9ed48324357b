#!lua flags=allow-oom
-- include: _keys.lua
-- include: _atropos.lua
-- A trainer registers. The first one after a reset says what the run is; a later one changes nothing.
-- ARGV: starting step, then name, value, ... of the registration
-- -> {MISSING} | {FINISHED} | {PROTOCOL} | {OK}
local refused = write_refusal()
if refused then return refused end
if redis.call('EXISTS', ATROPOS) == 0 then
  redis.call('HSET', ATROPOS, 'step', ARGV[1], unpack(ARGV, 2))
  emit('register')
end
return {'OK'}
