#!lua flags=allow-oom
-- include: _keys.lua
-- End the run. Permits still out are void; groups stay where they are.
-- ARGV: incarnation, or '' for an operator, who needs none
-- -> {OK, record...} | {MISSING} | {FENCED, incarnation}
local incarnation = ARGV[1]

local current = state()
if not current then return {'MISSING'} end
if incarnation ~= '' and fenced(incarnation) then return {'FENCED', redis.call('HGET', RECORD, 'incarnation')} end
if current ~= 'finished' then
  redis.call('HSET', RECORD, 'state', 'finished')
  redis.call('HDEL', STACKS, redis.call('HGET', RECORD, 'stack'))
  redis.call('DEL', PERMITS, HOLDERS, REISSUE)
  note('finish')
  tell('permits')
  tell('ready')
end
return {'OK', redis.call('HGETALL', RECORD)}
