#!lua flags=allow-oom
-- include: _keys.lua
-- An environment goes: its share of batches and permits is free.
-- ARGV: environment id
-- -> {MISSING} | {OK, 1 if it was registered}
local id = ARGV[1]

if not state() then return {'MISSING'} end
local known = redis.call('ZREM', ENVS, id)
redis.call('DEL', env(id))
if known == 1 then
  tell('ready')
  tell('permits')
end
return {'OK', known}
