#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- Lease a batch from the head of the queue under an id that the trainer chose. Returns ids and sizes only.
--
-- By groups or sequences the batch is exactly so many; a group that does not fit is passed over for a later one. By
-- tokens it is as many groups, in order, as fit in the budget, at least one; `partial` takes what there is.
-- A live environment's min_batch_allocation keeps that share of a batch of groups or sequences for its groups.
-- Groups met on the way that were delivered too often are set aside, those that are too old dropped.
-- ARGV: incarnation, batch id, groups|sequences|tokens, amount, partial '1'|'', ttl ms, max attempts,
--       max staleness (steps) or ''
-- -> {OK, dead, stale, group id, bytes, raw bytes, schema, ...} | {WAIT, dead, stale}
--  | {MISSING} | {FENCED, incarnation} | {FINISHED} | {ACKED}
local incarnation, id, unit = unpack(ARGV, 1, 3)
local amount, partial, ttl, max_attempts = tonumber(ARGV[4]), ARGV[5] == '1', tonumber(ARGV[6]), tonumber(ARGV[7])
local max_staleness = tonumber(ARGV[8])
-- A lease looks at so many groups at most, so that its cost has a bound whatever the queue holds.
local CHUNK, MAX_WALK = 64, 4096

local current = state()
if not current then return {'MISSING'} end
if fenced(incarnation) then return {'FENCED', redis.call('HGET', RECORD, 'incarnation')} end
if current == 'finished' then return {'FINISHED'} end

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
-- A retry: the same batch, whether its lease still runs or ran out with nobody taking the groups.
local live, late = redis.call('ZSCORE', LEASES, id), redis.call('SISMEMBER', EXPIRED, id) == 1
if live or late then
  if late then revive(id) end
  redis.call('ZADD', LEASES, at + ttl, id)
  return answer('OK', redis.call('LRANGE', batch(id), 0, -1))
end
if redis.call('ZSCORE', ACKED, id) then return {'ACKED'} end
reap_leases(at)

-- What is kept for whom: environment -> units of this batch that only its groups may fill.
local kept, kept_sum = {}, 0
if unit ~= 'tokens' then
  local wanted, sum = {}, 0
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', ENVS, '(' .. at, '+inf')) do
    local share = tonumber(redis.call('HGET', env(name), 'min_batch_allocation'))
    if share then
      wanted[name] = share
      sum = sum + share
    end
  end
  for name, share in pairs(wanted) do
    kept[name] = math.floor(amount * share / math.max(sum, 1))
    kept_sum = kept_sum + kept[name]
  end
end

local chosen, taken, full = {}, 0, false

-- Whether a group of `size` units by `by` has a place in the batch, and if so takes it.
local function place(size, by)
  if unit == 'tokens' then
    full = #chosen > 0 and taken + size > amount
    return not full
  end
  local own = math.min(kept[by] or 0, size)
  if taken + size + kept_sum - own > amount then return false end
  if own > 0 then
    kept[by] = kept[by] - own
    kept_sum = kept_sum - own
  end
  return true
end

local step = tonumber(redis.call('HGET', RECORD, 'version_step'))
local from, walked = 0, 0
while not full and taken < amount and walked < MAX_WALK do
  local chunk = redis.call('ZRANGE', READY, from, from + CHUNK - 1)
  if #chunk == 0 then break end
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
      from = from + 1
      local size = unit == 'groups' and 1 or tonumber(unit == 'sequences' and facts[4] or facts[5])
      if place(size, facts[3]) then
        chosen[#chosen + 1] = member
        taken = taken + size
      end
    end
  end
  walked = walked + #chunk
end
if unit == 'tokens' then
  if #chosen == 0 or not (full or taken >= amount or partial) then return answer('WAIT', {}) end
elseif taken < amount then
  return answer('WAIT', {})
end

lend(chosen, id)
redis.call('ZADD', LEASES, at + ttl, id)
emit('lease', 'batch', id, 'groups', #chosen)
return answer('OK', chosen)
