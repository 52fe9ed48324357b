#!lua flags=allow-oom
-- include: _keys.lua
-- include: _ahead.lua
-- Keep permits alive: those named, or with none named all of the holder. An expired permit that was not issued
-- again is alive again, if the holder had it. A permit of those named that is one too many is issued again later, and is lost.
-- ARGV: holder, ttl ms, 'all' | 'named', group id...
-- -> {MISSING} | {SUSPENDED} | {OK, renewed count, lost group id...}
local holder, ttl, which = unpack(ARGV, 1, 3)

local current = state()
if not current then return {'MISSING'} end
local refused = foreign(holder)
if refused then return refused end
if current == 'suspended' then return {'SUSPENDED'} end
local deadline = now() + ttl
local answer = {'OK', 0}
if which == 'all' then
  local held = redis.call('HGETALL', HOLDERS)
  for i = 1, #held, 2 do
    if held[i + 1] == holder then
      redis.call('ZADD', PERMITS, deadline, held[i])
      answer[2] = answer[2] + 1
    end
  end
  return answer
end
for i = 4, #ARGV do
  local id = ARGV[i]
  local by = redis.call('HGET', HOLDERS, id)
  if by == holder and is_surplus(by) then
    reissue(id)
    one_less_ahead()
    answer[#answer + 1] = id
  elseif by == holder then
    redis.call('ZADD', PERMITS, deadline, id)
    answer[2] = answer[2] + 1
  elseif current == 'open' and lapsed(id, holder) and not is_surplus(nil) then
    leave_reissue(id)
    redis.call('ZADD', PERMITS, deadline, id)
    redis.call('HSET', HOLDERS, id, holder)
    answer[2] = answer[2] + 1
  else
    answer[#answer + 1] = id
  end
end
return answer
