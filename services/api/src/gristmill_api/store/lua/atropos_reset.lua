#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- include: _atropos.lua
-- Forget the registrations; batches on their way count for nothing any more, and the queue and the buffers are dropped.
-- A long queue takes several calls, so that none holds up the others for long: '' first, then the answer's number until
-- none is left.
-- ARGV: '' | seq up to which to drop, groups to drop in one call
-- -> {MISSING} | {OK, seq, groups left}
if not state() then return {'MISSING'} end
local last = ARGV[1]
if last == '' then
  last = redis.call('HGET', COUNTERS, 'seq') or '0'
  for _, number in ipairs(redis.call('ZRANGE', ENVS, 0, -1)) do
    for _, id in ipairs(pieces_of(number)) do
      local facts = redis.call('HMGET', held(id), 'sequences', 'step')
      redis.call('HSET', group(id), 'env_id', number, 'sequences', facts[1], 'step', facts[2]) -- log_fate reads them
      record_drop(id, 'reset')
      redis.call('DEL', group(id))
    end
    forget_env(number)
  end
  redis.call('DEL', ATROPOS, NAMES)
  for _, id in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
    if string.sub(id, 1, 8) == 'atropos:' then
      for _, member in ipairs(redis.call('LRANGE', batch(id), 0, -1)) do return_to_ready(member) end
      redis.call('ZREM', LEASES, id)
      delete_batch(id)
    end
  end
  emit('reset')
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', READY, '-inf', last, 'LIMIT', 0, ARGV[2])) do
  leave_expired(id)
  drop(id, 'reset')
end
return {'OK', last, redis.call('ZCOUNT', READY, '-inf', last)}
