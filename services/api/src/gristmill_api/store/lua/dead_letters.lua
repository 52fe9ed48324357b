#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- Settle dead letters. Those that are replayed are ready again, in the places they had, with all their attempts before
-- them. Those that are purged are dropped.
-- ARGV: 'replay' | 'purge', 'all' | 'named', group id...
-- -> {MISSING} | {OK, count}
local what, which = ARGV[1], ARGV[2]

if not state() then return {'MISSING'} end
local ids = {unpack(ARGV, 3)}
if which == 'all' then ids = redis.call('ZRANGE', DEAD, 0, -1) end
local settled = 0
for _, id in ipairs(ids) do
  if redis.call('ZSCORE', DEAD, id) then
    settled = settled + 1
    if what == 'purge' then
      drop(id, 'purged')
    else
      return_to_ready(id)
      redis.call('HSET', group(id), 'attempts', 0)
      redis.call('HDEL', group(id), 'reason')
      redis.call('HINCRBY', COUNTERS, 'accepted', 1)
      log_event('replay', 'group', id)
      log_fate(id, 'replayed', 'replayed')
    end
  end
end
if what == 'replay' and settled > 0 then publish('ready') end
return {'OK', settled}
