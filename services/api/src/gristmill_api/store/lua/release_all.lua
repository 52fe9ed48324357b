#!lua flags=allow-oom
-- include: _keys.lua
-- Return all permits of a holder; their rows are issued again.
-- ARGV: holder
-- -> {MISSING} | {OK, count}
local holder = ARGV[1]

if not state() then return {'MISSING'} end
local held = redis.call('HGETALL', HOLDERS)
local count = 0
for i = 1, #held, 2 do
  if held[i + 1] == holder then
    redis.call('ZREM', PERMITS, held[i])
    redis.call('HDEL', HOLDERS, held[i])
    redis.call('ZADD', REISSUE, string.sub(held[i], 2), held[i])
    count = count + 1
  end
end
if count > 0 then publish('permits') end
return {'OK', count}
