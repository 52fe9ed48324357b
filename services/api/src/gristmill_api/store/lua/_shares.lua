-- Room in each batch (lease.lua) and permits (permits.lua) for environments with a min_batch_allocation. Neither keeps
-- more than can still arrive: groups of the environment that are ready, permits that it holds, and, if it asks for
-- permits, permits that are free. So no lease waits for groups that cannot arrive, and an environment that only sends
-- heartbeats keeps nothing.

-- Permits that may still be issued when `out` are out (_ahead.lua); 0 before a version was recorded.
local function free_permits(out)
  local needed = needed_groups()
  return needed and needed > 0 and math.max(0, most_out(needed) - out) or 0
end

-- The environments with a share, by name: {name, share, asks, ready = {size -> groups}, groups (ready ones), out (permits
-- that it holds)}; and a divisor, with which the shares sum to 1 at most. An environment asks for permits if it did so,
-- or registered, in the last `silence` ms.
local function envs_with_share(at, silence)
  local found, by_name, sum = {}, {}, 0
  local function add(name, share, asks)
    local one = {name = name, share = tonumber(share), asks = asks, ready = {}, groups = 0, out = 0}
    found[#found + 1] = one
    by_name[name] = one
    sum = sum + one.share
  end
  -- An environment of Atropos' protocol never asks for permits: room is kept for its groups that are ready.
  for _, name in ipairs(alive(at)) do
    local facts = redis.call('HMGET', env(name), 'min_batch_allocation', 'asked_ms')
    if tonumber(facts[1]) then add(name, math.max(0, facts[1]), at - (facts[2] or 0) < silence) end
  end
  if #found == 0 then return found, 1 end

  table.sort(found, function(a, b) return a.name < b.name end)
  local kinds = redis.call('HGETALL', READY_BY_SIZE)
  for i = 1, #kinds, 2 do
    local size, name = string.match(kinds[i], '^(%d+) (.*)$')
    local one, groups = by_name[name], tonumber(kinds[i + 1])
    if one then
      one.ready[tonumber(size)] = groups
      one.groups = one.groups + groups
    end
  end
  local held = redis.call('HGETALL', HOLDERS)
  for i = 1, #held, 2 do
    local one = by_name[held[i + 1]]
    if one and tonumber(redis.call('ZSCORE', PERMITS, held[i])) > at then one.out = one.out + 1 end
  end
  return found, math.max(sum, 1)
end
