-- Selects groups that sum to an exact number of sequences.

-- Bound of the table that finds a sum: sizes times target. A larger table would block Redis.
local MAX_SUMS = 262144

-- {size, count} of the groups, or of {size, count}, in the order in which the sizes come first.
local function by_size(list)
  local counts, place = {}, {}
  for _, one in ipairs(list) do
    if not place[one.size] then
      counts[#counts + 1] = {size = one.size, count = 0}
      place[one.size] = #counts
    end
    local entry = counts[place[one.size]]
    entry.count = entry.count + (one.count or 1)
  end
  return counts
end

-- How many of each size sum to `target`, the largest sizes first. nil: this order misses the target.
local function largest_first(counts, target)
  local sorted, of, left = {}, {}, target
  for i, one in ipairs(counts) do sorted[i] = one end
  table.sort(sorted, function(a, b) return a.size > b.size end)
  for _, one in ipairs(sorted) do
    of[one.size] = math.min(one.count, math.floor(left / one.size))
    left = left - of[one.size] * one.size
  end
  if left == 0 then return of end
end

-- How many of each size sum to `target`: of the first sizes as many as can be. counts: {size, count} in order. nil: no
-- counts do, or none were found within MAX_SUMS.
local function counts_that_sum(counts, target)
  if #counts * target > MAX_SUMS then return largest_first(counts, target) end
  -- used[i][j]: the fewest of size i with which the first i sizes reach j
  local used = {[0] = {[0] = 0}}
  for i, one in ipairs(counts) do
    used[i] = {}
    for j = 0, target do
      if used[i - 1][j] then
        used[i][j] = 0
      elseif j >= one.size and used[i][j - one.size] and used[i][j - one.size] < one.count then
        used[i][j] = used[i][j - one.size] + 1
      end
    end
  end
  if not used[#counts][target] then return nil end
  local of, left = {}, target
  for i = #counts, 1, -1 do
    of[counts[i].size] = used[i][left]
    left = left - used[i][left] * counts[i].size
  end
  return of
end

-- Whether some of the groups may sum to `target`; false only if it is known that none do.
local function may_sum(counts, target)
  return #counts * target > MAX_SUMS or counts_that_sum(counts, target) ~= nil
end

-- Of the groups, in their order, those that `of` (size -> how many) names, appended to `chosen`.
local function pick(groups, of, chosen)
  for _, one in ipairs(groups) do
    if (of[one.size] or 0) > 0 then
      of[one.size] = of[one.size] - 1
      chosen[#chosen + 1] = one
    end
  end
  return chosen
end
