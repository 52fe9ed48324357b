#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- include: _atropos.lua
-- include: _ahead.lua
-- include: _shares.lua
-- include: _sums.lua
-- include: _select_in_order.lua
-- include: _select_packed.lua
-- Lease a batch of ready groups under an id that the caller chose. Returns ids and sizes only. The unit names the rule by
-- which the groups are selected: _select_in_order.lua for /v1, _select_packed.lua for Atropos' protocol ('packed').
-- ARGV: incarnation or '', batch id, groups|sequences|tokens|packed, amount or '' (packed: the registered batch size),
--       partial '1'|'', look '1'|'', ttl ms, max attempts, ms after which an environment that did not ask for permits is
--       not waited for, max staleness (steps) or ''
-- look '': answer WAIT, without reading the queue, if the queue holds less than the amount. A trainer that waits asks
-- again at each submit, and only now and then needs the queue read for groups that are too old.
-- -> {OK, dead, stale, group id, bytes, ...} | {WAIT, dead, stale}
--  | {MISSING} | {SUSPENDED} | {FENCED, incarnation} | {FINISHED} | {ACKED} | {UNREGISTERED}: no trainer of Atropos'
local incarnation, id, unit = unpack(ARGV, 1, 3)
local amount, partial, look, ttl = tonumber(ARGV[4]), ARGV[5] == '1', ARGV[6] == '1', tonumber(ARGV[7])
local max_attempts, silence, max_staleness = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])

local refused = refusal(incarnation)
if refused then return refused end
if unit == 'packed' then
  local trainer = redis.call('HMGET', ATROPOS, 'batch_size', 'started')
  if not trainer[1] then return {'UNREGISTERED'} end
  if not trainer[2] then redis.call('HSET', ATROPOS, 'started', 1) end
  amount = tonumber(trainer[1])
elseif state() == 'finished' then
  return {'FINISHED'}
end

local dead, stale = 0, 0
local function answer(word, ids)
  local out = {word, dead, stale}
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
if not look then
  local ready = unit == 'groups' and redis.call('ZCARD', READY)
    or unit == 'sequences' and tonumber(redis.call('HGET', COUNTERS, 'ready_sequences') or 0)
  if ready and ready < amount then return answer('WAIT', {}) end
end

local chosen
if unit == 'packed' then
  chosen, dead = select_packed(amount, at, max_attempts)
else
  chosen, dead, stale = select_in_order(unit, amount, partial, at, silence, max_attempts, max_staleness)
end
if not chosen then return answer('WAIT', {}) end

local ids = {}
for i, one in ipairs(chosen) do ids[i] = one.id end
lease_groups(ids, id)
redis.call('ZADD', LEASES, at + ttl, id)
emit('lease', 'batch', id, 'groups', #ids)
return answer('OK', ids)
