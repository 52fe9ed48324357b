#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- Give dead letters up for good.
-- ARGV: 'all' | 'named', group id...
-- -> {MISSING} | {OK, count}
if not state() then return {'MISSING'} end
local ids = {unpack(ARGV, 2)}
if ARGV[1] == 'all' then ids = redis.call('ZRANGE', DEAD, 0, -1) end
local purged = 0
for _, id in ipairs(ids) do
  if redis.call('ZSCORE', DEAD, id) then
    drop(id, 'purged')
    purged = purged + 1
  end
end
return {'OK', purged}
