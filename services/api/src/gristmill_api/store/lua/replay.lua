#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- Dead letters are ready again, in the places they had, with all their attempts before them.
-- ARGV: 'all' | 'named', group id...
-- -> {MISSING} | {OK, count}
if not state() then return {'MISSING'} end
local ids = {unpack(ARGV, 2)}
if ARGV[1] == 'all' then ids = redis.call('ZRANGE', DEAD, 0, -1) end
local replayed = 0
for _, id in ipairs(ids) do
  if redis.call('ZSCORE', DEAD, id) then
    return_to_ready(id)
    redis.call('HSET', group(id), 'attempts', 0)
    redis.call('HDEL', group(id), 'reason')
    redis.call('HINCRBY', COUNTERS, 'accepted', 1)
    emit('replay', 'group', id)
    replayed = replayed + 1
  end
end
if replayed > 0 then publish('ready') end
return {'OK', replayed}
