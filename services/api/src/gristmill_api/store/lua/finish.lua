#!lua flags=allow-oom
-- include: _keys.lua
-- include: _life.lua
-- End the run. Permits still out are void; groups keep their states, and tombstones expire.
-- ARGV: incarnation, or '' for an operator, who may also end a suspended run; ms for which tombstones stay
-- -> {OK, record...} | {MISSING} | {SUSPENDED} | {FENCED, incarnation}
local incarnation, tombs_ttl = unpack(ARGV)

local no = refusal(incarnation)
if no then return no end
if state() ~= 'finished' then
  redis.call('HSET', RECORD, 'state', 'finished')
  local id = redis.call('HGET', RECORD, 'run_id')
  let_go(redis.call('HGET', RECORD, 'stack'), id)
  redis.call('SREM', OPEN_RUNS, id)
  redis.call('ZADD', FINISHED_RUNS, now(), id)
  for _, tombs in ipairs({TRAINED, DROPPED, TOMBS}) do redis.call('PEXPIRE', tombs, tombs_ttl) end
  redis.call('DEL', PERMITS, HOLDERS, REISSUE)
  note('finish')
  tell('permits')
  tell('ready')
end
return {'OK', redis.call('HGETALL', RECORD)}
