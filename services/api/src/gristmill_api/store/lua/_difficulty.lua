-- Rows that rest. Environments of a run with a `curriculum` report the mean reward of each scored group of a row, with the
-- numbers of the row's next turns. If the mean over the row's last groups is outside of the band, permits.lua passes over
-- these numbers. The row of a number never changes, so nothing else has to be decided, or kept, when a permit is issued.
--
-- COUNTERS: rows_below, rows_within, rows_above: known rows by the place of their mean (a row with too few groups is within);
-- passed: numbers that were passed over.

local MAX_KNOWN_ROWS, MAX_TURNS_AHEAD, ROUNDING = 131072, 67108864, 1 / 1000000000

-- Count a group of a row. It is called once for each group, because a repeated submit or return has ended before.
-- result: '' | "<row> <mean reward> <low end of the band> <high end> <groups that count> <number of a next turn>..."
local function record_result(result)
  if result == '' then return end
  local words = {}
  for word in string.gmatch(result, '%S+') do words[#words + 1] = word end
  local row, reward, low, high, most = unpack(words, 1, 5)
  local known = redis.call('HGET', DIFFICULTY, row)
  if not known and redis.call('HLEN', DIFFICULTY) >= MAX_KNOWN_ROWS then return end
  local groups, was, earlier = string.match(known or '0 new', '^(%d+) (%l+)(.*)$')
  local rewards, sum = {reward}, tonumber(reward)
  for one in string.gmatch(earlier, '%S+') do
    if #rewards < tonumber(most) then
      rewards[#rewards + 1] = one
      sum = sum + one
    end
  end
  local mean, place = sum / #rewards, 'within'
  if #rewards == tonumber(most) then
    if mean < low - ROUNDING then place = 'below' elseif mean > high + ROUNDING then place = 'above' end
  end
  redis.call('HSET', DIFFICULTY, row, groups + 1 .. ' ' .. place .. ' ' .. table.concat(rewards, ' '))
  if was ~= place then
    if known then redis.call('HINCRBY', COUNTERS, 'rows_' .. was, -1) end
    redis.call('HINCRBY', COUNTERS, 'rows_' .. place, 1)
  end
  -- Turns that were issued already may be among them, which changes nothing. A row that is within plays its turns, also
  -- those at which it rested after a result before.
  local rests = place == 'within' and 0 or 1
  local beyond = rests == 0 and 8 * redis.call('STRLEN', RESTING) or redis.call('HGET', COUNTERS, 'rows') + MAX_TURNS_AHEAD
  for i = 6, #words do
    if tonumber(words[i]) < beyond then redis.call('SETBIT', RESTING, words[i], rests) end
  end
end

-- Count a new number as issued, the first one whose row does not rest, and return it.
local function issue_number()
  if redis.call('EXISTS', RESTING) == 0 then return redis.call('HINCRBY', COUNTERS, 'rows', 1) - 1 end
  local first = tonumber(redis.call('HGET', COUNTERS, 'rows') or 0)
  local number = redis.call('BITPOS', RESTING, 0, first, -1, 'BIT')
  if number < 0 then number = math.max(first, 8 * redis.call('STRLEN', RESTING)) end -- all bits from `first` on are set
  if number > first then redis.call('HINCRBY', COUNTERS, 'passed', number - first) end
  redis.call('HSET', COUNTERS, 'rows', number + 1)
  return number
end
