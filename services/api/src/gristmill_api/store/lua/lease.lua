#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- include: _atropos.lua
-- include: _sums.lua
-- include: _select.lua
-- Lease a batch of ready groups under an id that the caller chose. Returns ids and sizes only. _select.lua selects the groups.
-- ARGV: incarnation or '', batch id, groups|sequences|atropos, amount or '' (atropos: the sequences that its trainer
--       registered), ttl ms, max attempts
-- -> {OK, dead, group id, bytes, ...} | {WAIT, dead}
--  | {MISSING} | {SUSPENDED} | {FENCED, incarnation} | {FINISHED} | {ACKED} | {UNREGISTERED}: no trainer of Atropos'
local incarnation, id, unit = unpack(ARGV, 1, 3)
local amount, ttl, max_attempts = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local refused = refusal(incarnation)
if refused then return refused end
local for_atropos = unit == 'atropos'
if for_atropos then
  local trainer = redis.call('HMGET', ATROPOS, 'batch_size', 'started')
  if not trainer[1] then return {'UNREGISTERED'} end
  if not trainer[2] then redis.call('HSET', ATROPOS, 'started', 1) end
  amount = tonumber(trainer[1])
elseif state() == 'finished' then
  return {'FINISHED'}
end

local dead = 0
local function answer(word, ids)
  local out = {word, dead}
  for _, member in ipairs(ids) do
    out[#out + 1] = member
    out[#out + 1] = redis.call('HGET', group(member), 'bytes')
  end
  return out
end

local at = now()
-- A retry: the same batch, whether its lease still runs, or ran out and no other lease has taken the groups.
local live, late = redis.call('ZSCORE', LEASES, id), redis.call('SISMEMBER', EXPIRED, id) == 1
if live or late then
  if late then revive(id) end
  redis.call('ZADD', LEASES, at + ttl, id)
  return answer('OK', redis.call('LRANGE', batch(id), 0, -1))
end
if redis.call('ZSCORE', ACKED, id) then return {'ACKED'} end
expire_leases(at)
local ready = unit == 'groups' and redis.call('ZCARD', READY)
  or tonumber(redis.call('HGET', COUNTERS, 'ready_sequences') or 0)
if amount < 1 or ready < amount then return answer('WAIT', {}) end

local chosen
chosen, dead = select_groups(unit, amount, at, max_attempts, for_atropos)
if not chosen then return answer('WAIT', {}) end

local ids = {}
for i, one in ipairs(chosen) do ids[i] = one.id end
lease_groups(ids, id)
redis.call('ZADD', LEASES, at + ttl, id)
emit('lease', 'batch', id, 'groups', #ids)
return answer('OK', ids)
