#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- Return one permit. Reason "abandoned": the row is issued again. Any other reason drops the group.
-- ARGV: holder, group id, reason, most reasons that are counted by name: others are counted as "other"
-- -> {OK} | {ALREADY} | {MISSING} | {LOST} | {SUBMITTED}
local holder, id, reason, most = unpack(ARGV)

if not state() then return {'MISSING'} end
if redis.call('EXISTS', group(id)) == 1 or redis.call('HEXISTS', TRAINED, id) == 1 then return {'SUBMITTED'} end
local dropped = redis.call('HGET', DROPPED, id)
if dropped then
  if dropped == reason then return {'ALREADY'} end
  return {'LOST'}
end
local waiting = redis.call('ZSCORE', REISSUE, id)
if waiting and reason == 'abandoned' then return {'ALREADY'} end
if not waiting and redis.call('HGET', HOLDERS, id) ~= holder then return {'LOST'} end

redis.call('ZREM', PERMITS, id)
redis.call('HDEL', HOLDERS, id)
if reason == 'abandoned' then
  redis.call('ZADD', REISSUE, string.sub(id, 2), id)
else
  redis.call('ZREM', REISSUE, id)
  redis.call('HSET', DROPPED, id, reason)
  local known = redis.call('HEXISTS', DROPS, reason) == 1 or redis.call('HLEN', DROPS) < tonumber(most)
  redis.call('HINCRBY', DROPS, known and reason or 'other', 1)
  add_tombstone(id)
  log_event('drop', 'group', id, 'reason', reason)
end
publish('permits')
return {'OK'}
