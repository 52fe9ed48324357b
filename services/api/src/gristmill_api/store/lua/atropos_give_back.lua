#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- The client left before all of the batch was sent: the groups are ready again, in their places.
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
