#!lua flags=allow-oom
-- include: _keys.lua
-- An environment goes: its share of batches and permits is free. An environment of Atropos' protocol is not registered here.
-- ARGV: environment id
-- -> {MISSING} | {OK, 1 if it was registered}
local id = ARGV[1]

if not state() then return {'MISSING'} end
if redis.call('HGET', RECORD, 'protocol') ~= 'gristmill' then return {'OK', 0} end
local known = redis.call('ZREM', ENVS, id)
redis.call('DEL', env(id))
if known == 1 then
  publish('ready')
  publish('permits')
end
return {'OK', known}
