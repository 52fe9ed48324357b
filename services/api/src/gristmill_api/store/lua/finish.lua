#!lua flags=allow-oom
-- include: _keys.lua
-- include: _life.lua
-- End the run. Permits still out are void; groups stay where they are.
-- ARGV: incarnation, or '' for an operator, who needs none and may end a suspended run, too
-- -> {OK, record...} | {MISSING} | {SUSPENDED} | {FENCED, incarnation}
local incarnation = ARGV[1]

local current = state()
if not current then return {'MISSING'} end
local no = incarnation ~= '' and refusal(incarnation)
if no then return no end
if current ~= 'finished' then
  redis.call('HSET', RECORD, 'state', 'finished')
  let_go(redis.call('HGET', RECORD, 'stack'), redis.call('HGET', RECORD, 'run_id'))
  redis.call('DEL', PERMITS, HOLDERS, REISSUE)
  note('finish')
  tell('permits')
  tell('ready')
end
return {'OK', redis.call('HGETALL', RECORD)}
