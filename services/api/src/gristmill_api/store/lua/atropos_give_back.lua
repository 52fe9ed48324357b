#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- The client vanished before it had the batch whole: its groups are ready again, in the places they had.
-- ARGV: batch id
-- -> {OK, groups}
local id = ARGV[1]
local members = {}
if redis.call('ZREM', LEASES, id) == 1 then
  members = redis.call('LRANGE', batch(id), 0, -1)
  for _, member in ipairs(members) do put_back(member) end
  dissolve(id)
  note('nack', 'batch', id, 'groups', #members)
  tell('ready')
end
return {'OK', #members}
