#!lua flags=allow-oom
-- include: _keys.lua
-- include: _atropos.lua
-- Record the policy version that the model server now serves. Permits for it become free. Environments of Atropos read
-- that a trainer has started, and the step.
-- ARGV: incarnation, step
-- -> {OK, record...} | {MISSING} | {SUSPENDED} | {FENCED, incarnation} | {FINISHED} | {BACKWARDS, recorded step}
local incarnation, step = unpack(ARGV)

local refused = refusal(incarnation)
if refused then return refused end
local known = redis.call('HMGET', RECORD, 'version_incarnation', 'version_step')
if known[1] == incarnation and tonumber(step) < tonumber(known[2]) then return {'BACKWARDS', known[2]} end
if state() == 'finished' then
  -- Only a retry of the recorded version is allowed.
  if known[1] == incarnation and known[2] == step then return {'OK', redis.call('HGETALL', RECORD)} end
  return {'FINISHED'}
end
redis.call('HSET', RECORD, 'version_incarnation', incarnation, 'version_step', step)
redis.call('HDEL', RECORD, 'went_back')
local first = string.match(redis.call('HGET', VERSIONS, incarnation) or step, '^%d+')
redis.call('HSETNX', VERSIONS, 'lowest', incarnation)
local highest = math.max(tonumber(step), tonumber(redis.call('HGET', VERSIONS, 'highest') or 0))
redis.call('HSET', VERSIONS, incarnation, first .. ' ' .. step, 'highest', string.format('%.0f', highest))
if redis.call('EXISTS', ATROPOS) == 1 then redis.call('HSET', ATROPOS, 'step', step, 'started', 1) end
log_event('version', 'version', incarnation .. '.' .. step)
publish('permits')
return {'OK', redis.call('HGETALL', RECORD)}
