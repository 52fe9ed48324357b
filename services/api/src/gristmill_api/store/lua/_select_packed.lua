-- Selects the ready groups for a batch of an exact number of sequences, by Atropos' rules.
--
-- Its rule: with M the largest group that is ready, groups of one size are packs once they sum to M; packs are taken
-- as they complete until the batch is full. If some environments have a share (min_batch_allocation), packs are of one
-- environment and size: first come the shares, then what else is packed in queue order.
-- By that rule some groups never leave: groups of a size that does not divide M, groups that would overfill the batch,
-- and, with shares, groups without an environment. So if the rule makes no batch, any groups that sum to the batch are
-- taken, the oldest first.
--
-- `kinds` holds {size, env_id, count} of all ready groups: what cannot be made is known without a walk of the queue.

local function read_kinds()
  local flat, kinds, largest = redis.call('HGETALL', READY_BY_SIZE), {}, 0
  for i = 1, #flat, 2 do
    local size, env_id = string.match(flat[i], '^(%d+) (.*)$')
    kinds[#kinds + 1] = {size = tonumber(size), env_id = env_id, count = tonumber(flat[i + 1])}
    largest = math.max(largest, tonumber(size))
  end
  return kinds, largest
end

-- The queue from its head, read piece by piece. `more` reads as many again as were read, and says whether any came.
local function reader(first)
  local queue = {groups = {}}
  function queue.more()
    local from = #queue.groups
    local ids = redis.call('ZRANGE', READY, from, from + math.max(first, from) - 1)
    for _, id in ipairs(ids) do
      local facts = redis.call('HMGET', group(id), 'sequences', 'env_id', 'attempts')
      queue.groups[#queue.groups + 1] =
        {id = id, size = tonumber(facts[1]), env_id = facts[2], attempts = tonumber(facts[3])}
    end
    return #ids > 0
  end
  return queue
end

-- Sequences of the packs that the groups of this kind make.
local function packed(kind, largest)
  if largest % kind.size ~= 0 then return 0 end
  return math.floor(kind.count * kind.size / largest) * largest
end

-- The rule without shares. Returns the groups, or nil and whether some of the queue can never leave by the rule.
local function pack(queue, kinds, largest, wanted)
  local possible, stuck = {}, false
  for _, kind in ipairs(kinds) do
    possible[kind.size] = (possible[kind.size] or 0) + kind.count
    stuck = stuck or largest % kind.size ~= 0
  end
  local sum = 0
  for size, count in pairs(possible) do sum = sum + packed({size = size, count = count}, largest) end
  if sum < wanted then return nil, stuck end

  local chosen, taken, open, at = {}, 0, {}, 0
  while true do
    at = at + 1
    if not queue.groups[at] and not queue.more() then return nil, stuck end
    local next_one = queue.groups[at]
    local bucket = open[next_one.size] or {}
    open[next_one.size] = bucket
    bucket[#bucket + 1] = next_one
    if #bucket * next_one.size == largest then
      for _, member in ipairs(bucket) do
        chosen[#chosen + 1] = member
        taken = taken + member.size
        if taken == wanted then return chosen end
        if taken > wanted then return nil, true end
      end
      open[next_one.size] = {}
    end
  end
end

-- {env_id, amount} of the environments with a share, in their order, scaled to the batch. nil: one has nothing packed.
local function amounts(shares, wanted, smallest)
  local found, sum = {}, 0
  for _, share in ipairs(shares) do
    local amount = wanted * share.share
    amount = amount < 0 and math.ceil(amount) or math.floor(amount)
    if amount > 0 then
      if not smallest[share.env_id] then return nil end
      found[#found + 1] = {env_id = share.env_id, amount = amount}
      sum = sum + amount
    end
  end
  if sum > wanted then
    for _, one in ipairs(found) do
      one.amount = math.max(smallest[one.env_id], math.floor(one.amount * (wanted / sum)))
    end
  end
  return found
end

-- The rule with shares.
local function pack_shares(queue, kinds, largest, wanted, shares)
  local packable, smallest, sum, stuck = {}, {}, 0, false
  for _, kind in ipairs(kinds) do
    local sequences = kind.env_id ~= '' and packed(kind, largest) or 0
    if sequences > 0 then
      packable[kind.size .. ' ' .. kind.env_id] = sequences / kind.size
      smallest[kind.env_id] = math.min(smallest[kind.env_id] or kind.size, kind.size)
      sum = sum + sequences
    end
    stuck = stuck or largest % kind.size ~= 0 or kind.env_id == ''
  end
  local minima = amounts(shares, wanted, smallest)
  if not minima or sum < wanted then return nil, stuck end

  -- of[env_id]: its packed groups in the order their packs complete; line: all packed groups in queue order
  local of, line, open, met, at = {}, {}, {}, {}, 0
  local function read_on()
    if not queue.groups[at + 1] and not queue.more() then return false end
    for i = at + 1, #queue.groups do
      local one = queue.groups[i]
      local kind = one.size .. ' ' .. one.env_id
      met[kind] = (met[kind] or 0) + 1
      if met[kind] <= (packable[kind] or 0) then
        line[#line + 1] = one
        local bucket = open[kind] or {}
        bucket[#bucket + 1] = one
        open[kind] = bucket
        if #bucket * one.size == largest then
          local list = of[one.env_id] or {}
          for _, member in ipairs(bucket) do list[#list + 1] = member end
          of[one.env_id] = list
          open[kind] = {}
        end
      end
    end
    at = #queue.groups
    return true
  end

  local function choose(whole)
    local chosen, taken, mine = {}, 0, {}
    local function take(one)
      if taken + one.size > wanted then return 0 end
      chosen[#chosen + 1] = one
      mine[one.id] = true
      taken = taken + one.size
      return one.size
    end
    for _, minimum in ipairs(minima) do
      local got = 0
      for _, one in ipairs(of[minimum.env_id] or {}) do
        if got >= minimum.amount then break end
        got = got + take(one)
      end
      if got < minimum.amount and taken < wanted and not whole then return nil end
    end
    for _, one in ipairs(line) do
      if taken == wanted then break end
      if not mine[one.id] then take(one) end
    end
    return taken == wanted and chosen or nil
  end

  while read_on() do
    local chosen = choose(false)
    if chosen then return chosen end
  end
  return choose(true), true
end

-- Any groups that sum to the batch: the shares first, then the oldest that fit, else whatever sums. nil: none do.
local function pack_any(queue, kinds, wanted, shares)
  if not counts_that_sum(by_size(kinds), wanted) then return nil end
  while queue.more() do end
  local smallest = {}
  for _, one in ipairs(queue.groups) do
    smallest[one.env_id] = math.min(smallest[one.env_id] or one.size, one.size)
  end
  local minima = amounts(shares, wanted, smallest)
  if not minima then return nil end

  local chosen, taken, rest = {}, 0, {}
  local due = {}
  for _, minimum in ipairs(minima) do due[minimum.env_id] = minimum.amount end
  for _, one in ipairs(queue.groups) do
    if (due[one.env_id] or 0) > 0 and taken + one.size <= wanted then
      due[one.env_id] = due[one.env_id] - one.size
      chosen[#chosen + 1] = one
      taken = taken + one.size
    else
      rest[#rest + 1] = one
    end
  end
  local of = counts_that_sum(by_size(rest), wanted - taken)
  if not of then return nil end
  return pick(rest, of, chosen)
end

-- The groups of the next batch, in order; nil if there is not a batch yet.
local function next_batch(kinds, largest, wanted, shares)
  local queue = reader(math.ceil(wanted / largest))
  local chosen, stuck
  if #shares > 0 then
    chosen, stuck = pack_shares(queue, kinds, largest, wanted, shares)
  else
    chosen, stuck = pack(queue, kinds, largest, wanted)
  end
  if chosen or not stuck then return chosen end
  return pack_any(queue, kinds, wanted, shares)
end

-- The living environments that have a share, in the order of their numbers: {env_id, share}.
local function shares_of_alive(at)
  local shares = {}
  for _, number in ipairs(alive_numbers(at)) do
    local share = tonumber(redis.call('HGET', env(number), 'min_batch_allocation'))
    if share then shares[#shares + 1] = {env_id = number, share = share} end
  end
  return shares
end

-- Returns the groups of the next batch, {id, ...} in order, or nil if there is not a batch yet; and how many groups that no
-- batch can hold became dead letters: they are larger than a batch, or were delivered too often. If a call gave up
-- MAX_PASSED groups, the API calls again (queue.py).
local function select_packed(wanted, at, max_attempts)
  local dead, shares = 0, shares_of_alive(at)
  local function give_up(member, reason)
    make_dead(member, reason)
    dead = dead + 1
  end
  -- Gives up every ready group for which there is a reason, up to MAX_PASSED. One walk: a walk per group would cost the
  -- square of the queue.
  local function sweep(reason)
    local queue = reader(256)
    while queue.more() do end
    for _, one in ipairs(queue.groups) do
      local why = reason(one)
      if why and dead < MAX_PASSED then give_up(one.id, why) end
    end
  end
  local chosen
  local clean
  repeat
    clean = true
    chosen = nil -- groups chosen before may be dead letters now
    local kinds, largest = read_kinds()
    if wanted < 1 or tonumber(redis.call('HGET', COUNTERS, 'ready_sequences') or 0) < wanted then break end
    if largest > wanted then
      sweep(function(one) return one.size > wanted and 'larger_than_a_batch' end)
      clean = false
    else
      chosen = next_batch(kinds, largest, wanted, shares)
      for _, one in ipairs(chosen or {}) do clean = clean and one.attempts < max_attempts end
      if not clean then sweep(function(one) return one.attempts >= max_attempts and 'undeliverable' end) end
    end
  until clean or dead >= MAX_PASSED
  return clean and chosen or nil, dead
end
