#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- Some groups of a leased batch cannot be sent: they are dead letters, the others ready again, as if never leased.
-- ARGV: batch id, then group id, reason, ...
-- -> {MISSING} | {OK, dead}
local id = ARGV[1]

if not state() then return {'MISSING'} end
if redis.call('ZREM', LEASES, id) == 0 then return {'OK', 0} end
local reasons, dead = {}, 0
for i = 2, #ARGV, 2 do reasons[ARGV[i]] = ARGV[i + 1] end
local members = redis.call('LRANGE', batch(id), 0, -1)
delete_batch(id)
for _, member in ipairs(members) do
  redis.call('HINCRBY', group(member), 'attempts', -1)
  return_to_ready(member)
  if reasons[member] then
    make_dead(member, reasons[member])
    dead = dead + 1
  end
end
publish('ready')
return {'OK', dead}
