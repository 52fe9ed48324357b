-- Permits ahead. When groups are dropped after their generation, as those with equal scores are, a step that needs one more
-- group would have one permit, and one prompt at a time would be generated. So a run that drops groups issues more permits
-- than it needs groups: needed x (1 + dropped / accepted), counted over its last LEAST to LATELY groups. A group that comes when the run has
-- all groups is not stored, and its row is issued again before any new row. Renewals report its permit as lost.
--
-- COUNTERS: lately_accepted and lately_dropped, halved together at LATELY; both are missing until the first drop. ahead: permits
-- that are out beyond the need.

local MAX_OUT, LATELY, LEAST, MOST_AHEAD = 65536, 64, 8, 16

-- Groups that the run still takes: accepted groups stay within min(version step + 1 + max staleness, training steps) x groups
-- per step. nil before a version was recorded, and while a trainer that went back has recorded none.
local function needed_groups()
  local plan = redis.call('HMGET', RECORD, 'version_step', 'max_staleness', 'training_steps', 'groups_per_step', 'went_back')
  if not plan[1] or plan[5] then return nil end
  local steps = math.min(plan[1] + 1 + plan[2], tonumber(plan[3]))
  return math.min(steps * plan[4] - tonumber(redis.call('HGET', COUNTERS, 'accepted') or 0), MAX_OUT)
end

local function lately() return unpack(redis.call('HMGET', COUNTERS, 'lately_accepted', 'lately_dropped')) end

-- How many permits may be out when the run needs `needed` groups.
local function most_out(needed)
  local accepted, dropped = lately()
  if not dropped or accepted + dropped < LEAST then return needed end
  return math.min(needed + math.floor(needed * math.min(dropped / math.max(accepted, 1), MOST_AHEAD)), MAX_OUT)
end

-- A group was accepted or dropped. The first drop counts the groups before it as accepted.
local function count_lately(field)
  local accepted, dropped = lately()
  if not dropped then
    if field == 'lately_accepted' then return end
    accepted, dropped = math.min(tonumber(redis.call('HGET', COUNTERS, 'accepted') or 0), LATELY / 2), 0
  end
  local counts = {lately_accepted = tonumber(accepted), lately_dropped = tonumber(dropped)}
  counts[field] = counts[field] + 1
  if counts.lately_accepted + counts.lately_dropped >= LATELY then
    for name, groups in pairs(counts) do counts[name] = math.floor(groups / 2) end
  end
  redis.call('HSET', COUNTERS, 'lately_accepted', counts.lately_accepted, 'lately_dropped', counts.lately_dropped)
end

local function permits_ahead() return tonumber(redis.call('HGET', COUNTERS, 'ahead') or 0) end
local function one_less_ahead()
  if permits_ahead() > 0 then redis.call('HINCRBY', COUNTERS, 'ahead', -1) end
end

-- Whether the run has all groups that it needs, and the permit of this holder (false: of no holder any more) is one too many.
local function is_surplus(holder)
  local needed = needed_groups()
  return needed ~= nil and needed <= 0 and (not holder or permits_ahead() > 0)
end
