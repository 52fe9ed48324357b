#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- include: _atropos.lua
-- include: _shares.lua
-- include: _sums.lua
-- Lease a batch from the head of the queue under an id that the trainer chose. Returns ids and sizes only.
--
-- By groups or sequences the batch has exactly the amount; a group that does not fit is passed over for a later one. By
-- tokens it is the groups, in order, that fit in the budget, at least one; `partial` takes the groups that are ready.
-- A batch of groups or sequences keeps room for environments with a min_batch_allocation, as far as groups of theirs can
-- still come (_shares.lua). If no more can come and the batch is not full, any groups of exactly its size make it.
-- A group that was delivered too often becomes a dead letter, and one that is too old is dropped.
-- ARGV: incarnation, batch id, groups|sequences|tokens, amount, partial '1'|'', look '1'|'', ttl ms, max attempts,
--       ms after which an environment that did not ask for permits is not waited for, max staleness (steps) or ''
-- look '': answer WAIT, without reading the queue, if the queue holds less than the amount. A trainer that waits asks
-- again at each submit, and only now and then needs the queue read for groups that are too old.
-- -> {OK, dead, stale, group id, bytes, raw bytes, schema, ...} | {WAIT, dead, stale}
--  | {MISSING} | {SUSPENDED} | {FENCED, incarnation} | {FINISHED} | {ACKED}
local incarnation, id, unit = unpack(ARGV, 1, 3)
local amount, partial, look, ttl = tonumber(ARGV[4]), ARGV[5] == '1', ARGV[6] == '1', tonumber(ARGV[7])
local max_attempts, silence, max_staleness = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
-- Bounds of a lease's cost, whatever the queue holds: groups passed over, and sums tried.
local CHUNK, MAX_PASSED, MAX_SUMS = 64, 4096, 262144

local no = refusal(incarnation)
if no then return no end
if state() == 'finished' then return {'FINISHED'} end

local buried, stale = 0, 0
local function answer(word, ids)
  local out = {word, buried, stale}
  for _, member in ipairs(ids) do
    local facts = redis.call('HMGET', group(member), 'bytes', 'raw_bytes', 'schema')
    out[#out + 1] = member
    for i = 1, 3 do out[#out + 1] = facts[i] end
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
reap_leases(at)
if not look then
  local ready = unit == 'groups' and redis.call('ZCARD', READY)
    or unit == 'sequences' and tonumber(redis.call('HGET', COUNTERS, 'ready_sequences') or 0)
  if ready and ready < amount then return answer('WAIT', {}) end
end

-- Environment -> units of this batch that only its groups may fill. `awaited`: some of them are for groups that are not
-- ready.
local kept, kept_sum, awaited = {}, 0, false
if unit ~= 'tokens' then
  local sharing, scale = sharers(at, silence)
  local free = #sharing > 0 and free_permits(redis.call('ZCOUNT', PERMITS, '(' .. at, '+inf'))
  for _, one in ipairs(sharing) do
    -- Whole groups only: nothing could fill the rest.
    local wanted, sizes = math.floor(amount * one.share / scale), {}
    local left = wanted
    for size in pairs(one.ready) do sizes[#sizes + 1] = size end
    table.sort(sizes, function(a, b) return a > b end)
    for _, size in ipairs(sizes) do
      local units = unit == 'groups' and 1 or size
      left = left - units * math.min(one.ready[size], math.floor(left / units))
    end
    local units = unit == 'groups' and 1 or tonumber(redis.call('HGET', RECORD, 'group_size'))
    local coming = math.min(math.floor(left / units), one.out + (one.asks and free or 0))
    free = free - math.max(0, coming - one.out)
    awaited = awaited or coming > 0
    kept[one.name] = wanted - left + coming * units
    kept_sum = kept_sum + kept[one.name]
  end
end

local chosen, taken, full = {}, 0, false

-- Takes the group into the batch if it has a place there.
local function place(one)
  if unit == 'tokens' then
    full = #chosen > 0 and taken + one.size > amount
    if full then return end
  else
    local own = math.min(kept[one.env_id] or 0, one.size)
    if taken + one.size + kept_sum - own > amount then return end
    if own > 0 then
      kept[one.env_id] = kept[one.env_id] - own
      kept_sum = kept_sum - own
    end
  end
  chosen[#chosen + 1] = one
  taken = taken + one.size
end

local step = tonumber(redis.call('HGET', RECORD, 'version_step'))
local seen, ended = {}, false
while not full and taken < amount and #seen - #chosen < MAX_PASSED do
  local chunk = redis.call('ZRANGE', READY, #seen, #seen + CHUNK - 1)
  ended = #chunk == 0
  if ended then break end
  for _, member in ipairs(chunk) do
    if full or taken >= amount then break end
    local facts = redis.call('HMGET', group(member), 'attempts', 'step', 'env_id', 'sequences', 'tokens')
    local oldest = tonumber(facts[2])
    if tonumber(facts[1]) >= max_attempts then
      bury(member, 'undeliverable')
      buried = buried + 1
    elseif max_staleness and step and oldest and step - oldest > max_staleness then
      leave_expired(member)
      drop(member, 'stale')
      stale = stale + 1
    else
      local size = unit == 'groups' and 1 or tonumber(unit == 'sequences' and facts[4] or facts[5])
      seen[#seen + 1] = {id = member, size = size, env_id = facts[3]}
      place(seen[#seen])
    end
  end
end
if unit == 'tokens' then
  if #chosen == 0 or not (full or taken >= amount or partial) then return answer('WAIT', {}) end
elseif taken < amount then
  if awaited and ended then return answer('WAIT', {}) end
  chosen, taken, kept, kept_sum = {}, 0, {}, 0
  for _, one in ipairs(seen) do place(one) end
  if taken < amount then
    local counts = by_size(seen)
    local of = #counts * amount <= MAX_SUMS and coins(counts, amount)
    if not of then return answer('WAIT', {}) end
    chosen = pick(seen, of, {})
  end
end

local ids = {}
for i, one in ipairs(chosen) do ids[i] = one.id end
lend(ids, id)
redis.call('ZADD', LEASES, at + ttl, id)
emit('lease', 'batch', id, 'groups', #ids)
return answer('OK', ids)
