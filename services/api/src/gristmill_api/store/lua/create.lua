#!lua flags=allow-oom
-- include: _keys.lua
-- Open a run, or join it. A stack (one model server and its trainer) works on one open run at a time.
-- ARGV: run id, environment (canonical JSON), digest, group size, stack or '', protocol, creation (random)
-- -> {CREATED|JOINED, record...} | {DIFFERS, env, group size, stack, protocol} | {BUSY, open run id}
local id, settings, digest, group_size, stack, protocol, creation = unpack(ARGV)

if state() then
  local known = redis.call('HMGET', RECORD, 'env', 'group_size', 'stack', 'protocol')
  if known[1] ~= settings or known[2] ~= group_size or known[3] ~= stack or known[4] ~= protocol then
    return {'DIFFERS', unpack(known)}
  end
  return {'JOINED', redis.call('HGETALL', RECORD)}
end
if stack ~= '' then
  local open = redis.call('HGET', STACKS, stack)
  if open then return {'BUSY', open} end
  redis.call('HSET', STACKS, stack, id)
end

local created = now()
redis.call('HSET', RECORD, 'run_id', id, 'state', 'open', 'digest', digest, 'env', settings, 'group_size', group_size,
  'stack', stack, 'protocol', protocol, 'incarnation', 0, 'created_ms', created, 'creation', creation)
redis.call('ZADD', RUNS, created, id)
redis.call('PUBLISH', EVENTS, 'open')
emit('open')
return {'CREATED', redis.call('HGETALL', RECORD)}
