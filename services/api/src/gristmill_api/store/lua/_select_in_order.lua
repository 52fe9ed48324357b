-- Selects the ready groups for a batch of /v1, in queue order.
--
-- By groups or sequences the batch has exactly the amount; a group that does not fit is passed over for a later one. By
-- tokens it is the groups, in order, that fit in the budget, at least one; `partial` takes the groups that are ready.
-- A batch of groups or sequences keeps room for environments with a min_batch_allocation, as far as groups of theirs can
-- still come (_shares.lua). If no more can come and the batch is not full, any groups of exactly its size make it.
-- A group that was delivered too often, or has no binary form, becomes a dead letter, and one that is too old is dropped.

-- Bound of a lease's cost, whatever the queue holds: groups passed over, and groups dropped or given up. If a call
-- reaches it without a batch, the API calls again (queue.py).
local CHUNK, MAX_PASSED = 64, 4096

-- The room that the batch keeps: environment -> units of this batch that only its groups may fill, the sum of these, and
-- whether some of the units are for groups that are not ready.
local function kept_room(unit, amount, at, silence)
  local kept, kept_sum, awaited = {}, 0, false
  if unit == 'tokens' then return kept, kept_sum, awaited end
  local sharing, scale = envs_with_share(at, silence)
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
  return kept, kept_sum, awaited
end

-- Returns the batch's groups in order, {id, ...}, or nil if there is not a batch yet; and how many groups became dead
-- letters, and how many were dropped.
local function select_in_order(unit, amount, partial, at, silence, max_attempts, max_staleness)
  local dead, stale = 0, 0
  local kept, kept_sum, awaited = kept_room(unit, amount, at, silence)
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
  while not full and taken < amount and #seen - #chosen + dead + stale < MAX_PASSED do
    local chunk = redis.call('ZRANGE', READY, #seen, #seen + CHUNK - 1)
    ended = #chunk == 0
    if ended then break end
    for _, member in ipairs(chunk) do
      if full or taken >= amount then break end
      local facts = redis.call('HMGET', group(member), 'attempts', 'step', 'env_id', 'sequences', 'tokens', 'unusable')
      local oldest = tonumber(facts[2])
      if facts[6] or tonumber(facts[1]) >= max_attempts then
        make_dead(member, facts[6] or 'undeliverable')
        dead = dead + 1
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
    if #chosen == 0 or not (full or taken >= amount or partial) then chosen = nil end
  elseif taken < amount then
    if awaited and ended then return nil, dead, stale end
    chosen, taken, kept, kept_sum = {}, 0, {}, 0
    for _, one in ipairs(seen) do place(one) end
    if taken < amount then
      local counts = by_size(seen)
      local of = counts_that_sum(counts, amount)
      chosen = of and pick(seen, of, {}) or nil
    end
  end
  return chosen, dead, stale
end
