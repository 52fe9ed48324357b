#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- include: _atropos.lua
-- The caller is done with these batches: their groups are trained and their payloads go. A trainer of /v1 acks once a
-- durable checkpoint covers them. A batch of Atropos' protocol ('') is acked once it was sent whole, and its step begins.
-- An expired batch is acked too if none of its groups was leased since. Lost batches do not keep the others from being
-- acked.
-- ARGV: incarnation or '', archive '1'|'', batch id...
-- -> {MISSING} | {SUSPENDED} | {FENCED, incarnation} | {OK, groups acked, batches acked, batches already, lost batch id...}
local incarnation, archive = ARGV[1], ARGV[2]

local refused = refusal(incarnation)
if refused then return refused end
local answer = {'OK', 0, 0, 0}
for i = 3, #ARGV do
  local id = ARGV[i]
  if redis.call('ZREM', LEASES, id) == 1 or redis.call('SREM', EXPIRED, id) == 1 then
    local members = redis.call('LRANGE', batch(id), 0, -1)
    for _, member in ipairs(members) do train(member, archive) end
    redis.call('DEL', batch(id))
    redis.call('ZADD', ACKED, now(), id)
    emit('ack', 'batch', id, 'groups', #members)
    if incarnation == '' then redis.call('HINCRBY', ATROPOS, 'step', 1) end
    answer[2] = answer[2] + #members
    answer[3] = answer[3] + 1
  elseif redis.call('ZSCORE', ACKED, id) then
    answer[4] = answer[4] + 1
  else
    answer[#answer + 1] = id
  end
end
redis.call('ZREMRANGEBYRANK', ACKED, 0, -4097)
if archive == '1' then publish('archive') end
return answer
