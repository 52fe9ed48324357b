#!lua flags=allow-oom
-- include: _keys.lua
-- include: _life.lua
-- End the run. Groups keep their states, and tombstones expire.
-- ARGV: incarnation, or '' for an operator, who may also end a suspended run; ms for which tombstones stay
-- -> {OK, record...} | {MISSING} | {SUSPENDED} | {FENCED, incarnation}
local incarnation, tombstones_ttl = unpack(ARGV)

local refused = refusal(incarnation)
if refused then return refused end
if state() ~= 'finished' then
  redis.call('HSET', RECORD, 'state', 'finished')
  local id = redis.call('HGET', RECORD, 'run_id')
  release_stack(redis.call('HGET', RECORD, 'stack'), id)
  redis.call('SREM', OPEN_RUNS, id)
  redis.call('ZADD', FINISHED_RUNS, now(), id)
  for _, key in ipairs({TRAINED, DROPPED, TOMBSTONES}) do redis.call('PEXPIRE', key, tombstones_ttl) end
  void_permits(P)
  log_event('finish')
  publish('permits')
  publish('ready')
end
return {'OK', redis.call('HGETALL', RECORD)}
