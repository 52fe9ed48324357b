#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- Extend leases. An expired lease is alive again if none of its groups was leased since.
-- ARGV: incarnation or '' (Atropos' protocol), ttl ms, batch id...
-- -> {MISSING} | {SUSPENDED} | {FENCED, incarnation} | {OK, lost batch id...}
local incarnation, ttl = ARGV[1], tonumber(ARGV[2])

local refused = refusal(incarnation)
if refused then return refused end
local deadline = now() + ttl
local answer = {'OK'}
for i = 3, #ARGV do
  local id = ARGV[i]
  local late = redis.call('SISMEMBER', EXPIRED, id) == 1
  if late then revive(id) end
  if late or redis.call('ZSCORE', LEASES, id) then
    redis.call('ZADD', LEASES, deadline, id)
  elseif not redis.call('ZSCORE', ACKED, id) then -- acked by a call that overtook this one: settled, not lost
    answer[#answer + 1] = id
  end
end
return answer
