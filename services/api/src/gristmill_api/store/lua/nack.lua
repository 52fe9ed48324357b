#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- Return batches: their groups are ready again, in their places. A batch that is not leased is ignored: its lease
-- expired, or the batch was returned before, or acked.
-- ARGV: incarnation or '' (Atropos' protocol), batch id...
-- -> {MISSING} | {SUSPENDED} | {FENCED, incarnation} | {OK, groups given back}
local incarnation = ARGV[1]

local refused = refusal(incarnation)
if refused then return refused end
local groups = 0
for i = 2, #ARGV do
  local id = ARGV[i]
  if redis.call('ZREM', LEASES, id) == 1 then
    local members = redis.call('LRANGE', batch(id), 0, -1)
    for _, member in ipairs(members) do return_to_ready(member) end
    delete_batch(id)
    log_event('nack', 'batch', id, 'groups', #members)
    groups = groups + #members
  end
end
if groups > 0 then publish('ready') end
return {'OK', groups}
