#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- include: _ahead.lua
-- include: _difficulty.lua
-- Return one permit of a holder, or all of its permits. Reason "abandoned": the row is issued again. Any other reason
-- drops the group.
-- ARGV: holder, group id or '' for all, reason, most reasons that are counted by name: others are counted as "other",
--       result of the row or '' (_difficulty.lua)
-- -> one: {MISSING} | {OK} | {ALREADY} | {LOST} | {SUBMITTED}
--    all, which have the reason "abandoned": {MISSING} | {OK, count}
local holder, id, reason, most, result = unpack(ARGV)

local current = state()
if not current then return {'MISSING'} end
local refused = foreign(holder)
if refused then return refused end
if id == '' then
  local held = redis.call('HGETALL', HOLDERS)
  local count = 0
  for i = 1, #held, 2 do
    if held[i + 1] == holder then
      reissue(held[i])
      count = count + 1
    end
  end
  if count > 0 then publish('permits') end
  return {'OK', count}
end

if redis.call('EXISTS', group(id)) == 1 or redis.call('HEXISTS', TRAINED, id) == 1 then return {'SUBMITTED'} end
local dropped = redis.call('HGET', DROPPED, id)
if dropped then
  if dropped == reason then return {'ALREADY'} end
  return {'LOST'}
end
local waiting = current ~= 'finished' and lapsed(id, holder)
if waiting and reason == 'abandoned' then return {'ALREADY'} end
if not waiting and redis.call('HGET', HOLDERS, id) ~= holder then return {'LOST'} end

if reason == 'abandoned' then
  reissue(id)
else
  redis.call('ZREM', PERMITS, id)
  redis.call('HDEL', HOLDERS, id)
  leave_reissue(id)
  redis.call('HSET', DROPPED, id, reason)
  local known = redis.call('HEXISTS', DROPS, reason) == 1 or redis.call('HLEN', DROPS) < tonumber(most)
  redis.call('HINCRBY', DROPS, known and reason or 'other', 1)
  add_tombstone(id)
  log_event('drop', 'group', id, 'reason', reason)
  log_fate(id, 'dropped', reason, holder)
  count_lately('lately_dropped')
  one_less_ahead()
  record_result(result)
end
publish('permits')
return {'OK'}
