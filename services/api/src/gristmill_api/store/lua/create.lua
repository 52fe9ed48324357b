#!lua flags=allow-oom
-- include: _keys.lua
-- Open a run, or join it.
-- ARGV: run id, environment (canonical JSON), digest, group size
-- -> {CREATED|JOINED, record...} | {DIFFERS, env, group size} | {BUSY, open run id}
local id, env, digest, group_size = unpack(ARGV)

if state() then
  local known = redis.call('HMGET', RECORD, 'env', 'group_size')
  if known[1] ~= env or known[2] ~= group_size then return {'DIFFERS', known[1], known[2]} end
  return {'JOINED', redis.call('HGETALL', RECORD)}
end
local open = redis.call('GET', OPEN)
if open then return {'BUSY', open} end

local created = now()
redis.call('HSET', RECORD, 'run_id', id, 'state', 'open', 'digest', digest, 'env', env, 'group_size', group_size,
  'incarnation', 0, 'created_ms', created)
redis.call('ZADD', RUNS, created, id)
redis.call('SET', OPEN, id)
redis.call('PUBLISH', EVENTS, 'open')
return {'CREATED', redis.call('HGETALL', RECORD)}
