-- Selects the ready groups of a batch, in queue order: a number of groups in a run of /v1, and groups with exactly this
-- number of sequences in a run of Atropos' environments.
--
-- By sequences, a group that does not fit is passed over for a later group. If the groups in order do not fill the batch,
-- any groups that sum to it make the batch (_sums.lua). Each living environment with a min_batch_allocation has its part
-- of the batch, in whole groups. Without the part, no batch is leased. The parts are not kept if no sum keeps them.
-- A group becomes a dead letter if it was delivered too often, is larger than a batch, or the trainer cannot read it.

-- Bound of the dead letters that a call makes. The API calls again (queue.py). A call reads no more of the queue than it needs
-- to fill the batch, and all of it if the groups in order do not.
local CHUNK, MAX_GIVEN_UP = 64, 4096

-- {size, env_id, count} of all ready groups, and the largest size.
local function ready_kinds()
  local flat, kinds, largest = redis.call('HGETALL', READY_BY_SIZE), {}, 0
  for i = 1, #flat, 2 do
    local size, env_id = string.match(flat[i], '^(%d+) (.*)$')
    kinds[#kinds + 1] = {size = tonumber(size), env_id = env_id, count = tonumber(flat[i + 1])}
    largest = math.max(largest, tonumber(size))
  end
  return kinds, largest
end

-- {env_id, part} of the living environments with a share, in sequences; together at most the batch.
local function parts_of_batch(wanted, at)
  local parts, sum = {}, 0
  for _, number in ipairs(alive(at)) do
    local share = tonumber(redis.call('HGET', env(number), 'min_batch_allocation')) or 0
    local part = math.floor(wanted * share)
    if part > 0 then
      parts[#parts + 1] = {env_id = number, part = part}
      sum = sum + part
    end
  end
  for _, share in ipairs(parts) do
    if sum > wanted then share.part = math.floor(share.part * wanted / sum) end
  end
  return parts
end

-- The room that the batch keeps: environment -> sequences that only its groups may fill, and their sum. nil: one more group
-- of an environment would still fit into its part, and is awaited. A group that is larger than the batch does not count.
local function kept_room(wanted, kinds, at)
  local kept, kept_sum = {}, 0
  for _, share in ipairs(parts_of_batch(wanted, at)) do
    local ready_here, ready = {}, 0
    for _, kind in ipairs(kinds) do
      if kind.env_id == share.env_id and kind.size <= wanted then
        ready_here[#ready_here + 1] = kind
        ready = ready + kind.size * kind.count
      end
    end
    if #ready_here == 0 then return nil end
    table.sort(ready_here, function(a, b) return a.size > b.size end)
    local smallest, unfilled = ready_here[#ready_here].size, share.part
    if ready + smallest <= share.part then return nil end
    for _, kind in ipairs(ready_here) do
      unfilled = unfilled - kind.size * math.min(kind.count, math.floor(unfilled / kind.size))
    end
    kept[share.env_id] = math.max(share.part - unfilled, smallest)
    kept_sum = kept_sum + kept[share.env_id]
  end
  return kept, kept_sum
end

-- Groups that sum to the batch, in order: first the oldest of each environment until they fill its room, then any. Or nil.
local function any_that_sum(seen, wanted, kept)
  local chosen, rest, taken, chosen_of = {}, {}, 0, {}
  for _, candidate in ipairs(seen) do
    local sum = chosen_of[candidate.env_id] or 0
    if sum < (kept[candidate.env_id] or 0) and taken + candidate.size <= wanted then
      chosen_of[candidate.env_id] = sum + candidate.size
      chosen[#chosen + 1] = candidate
      taken = taken + candidate.size
    else
      rest[#rest + 1] = candidate
    end
  end
  local counts = counts_that_sum(by_size(rest), wanted - taken)
  if not counts then return nil end
  pick(rest, counts, chosen)
  table.sort(chosen, function(a, b) return a.place < b.place end)
  return chosen
end

-- Returns the groups of the batch, {id, size} in order, or nil if there is not a batch yet; and how many groups became dead
-- letters. By groups, the caller has checked that enough are ready.
local function select_groups(unit, wanted, at, max_attempts, reads_all)
  local by_groups = unit == 'groups'
  local kept, kept_sum, unfilled, awaits = {}, 0, {}, false
  if not by_groups then
    local kinds, largest = ready_kinds()
    if largest <= wanted and not may_sum(by_size(kinds), wanted) then return nil, 0 end
    kept, kept_sum = kept_room(wanted, kinds, at)
    awaits = not kept
    -- Larger groups are in the queue: this call still makes them dead letters.
    if awaits and largest <= wanted then return nil, 0 end
    kept, kept_sum = kept or {}, kept_sum or 0
    for env_id, room in pairs(kept) do unfilled[env_id] = room end
  end

  local seen, chosen, taken, dead = {}, {}, 0, 0
  while taken < wanted and dead < MAX_GIVEN_UP do
    local chunk = redis.call('ZRANGE', READY, #seen, #seen + CHUNK - 1)
    if #chunk == 0 then break end
    for _, id in ipairs(chunk) do
      if taken == wanted then break end
      local facts = redis.call('HMGET', group(id), 'attempts', 'env_id', 'sequences', 'unusable')
      local size = by_groups and 1 or tonumber(facts[3])
      local reason = not reads_all and facts[4] or tonumber(facts[1]) >= max_attempts and 'undeliverable'
        or size > wanted and 'larger_than_a_batch'
      if reason then
        make_dead(id, reason)
        dead = dead + 1
      else
        seen[#seen + 1] = {id = id, size = size, env_id = facts[2], place = #seen}
        local in_room = math.min(unfilled[facts[2]] or 0, size)
        if not awaits and taken + size + kept_sum - in_room <= wanted then
          chosen[#chosen + 1] = seen[#seen]
          taken = taken + size
          if in_room > 0 then unfilled[facts[2]] = unfilled[facts[2]] - in_room end
          kept_sum = kept_sum - in_room
        end
      end
    end
  end
  if taken == wanted then return chosen, dead end
  if by_groups or awaits or dead >= MAX_GIVEN_UP then return nil, dead end
  return any_that_sum(seen, wanted, kept) or any_that_sum(seen, wanted, {}), dead
end
