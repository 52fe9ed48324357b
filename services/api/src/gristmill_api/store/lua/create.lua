#!lua flags=allow-oom
-- include: _keys.lua
-- include: _life.lua
-- Open a run, join it, or resume it. A run of other settings is extended or replaced if the API asks for that: the API
-- compares the settings, and sends the digest of those that it compared with.
-- ARGV: run id, environment (canonical JSON), digest, group size, stack or '', protocol, creation (random),
--       '' | 'extend' | 'replace', compared digest or '', most runs,
--       '1' if the fates of groups go to disk, most runs that no trainer has taken
-- -> {CREATED|JOINED, record...} | {DELETING}: call delete.lua until it is done, then this again
--  | {DIFFERS, env, group size, stack, protocol, digest, training steps or nil, '1' if a step is finished, now, environment
--     alive, deadline, ...}
--  | {ARCHIVING, groups and fates that wait to be written}: the run cannot be replaced yet
--  | {FULL}: there are too many runs
--  | {UNTAKEN, run id}: there are too many runs that no trainer has taken; delete this one, then call this again
--  | {WAITING}: the same, and a living environment works on each of them
--  | {BUSY, open run id, now, environment alive, deadline, ...}
--  | {IN_USE, run id, permits that are out, ms until the last expires}: the caller is an environment
--  | {WORKING, environment of another process that is alive, ms until it counts as dead}
local id, settings, digest, group_size, stack, protocol, creation, change, compared, most, archive, most_untaken = unpack(ARGV)

if redis.call('EXISTS', DELETED) == 1 then return {'DELETING'} end
local at, current = now(), state()
if current then
  local known = redis.call('HMGET', RECORD, 'env', 'group_size', 'stack', 'protocol', 'digest', 'training_steps')
  local same = known[1] == settings and known[2] == group_size and known[3] == stack and known[4] == protocol
  if same and current ~= 'suspended' then return {'JOINED', redis.call('HGETALL', RECORD)} end
  local envs = alive_with_deadlines(P, at)
  if not same and change == 'replace' and known[5] == compared and not started() and #envs == 0 then
    local used = used_by_others(P, id, at)
    if used then return used end
    local waiting = waiting_for_disk(archive)
    if waiting > 0 then return {'ARCHIVING', waiting} end
    begin_deletion()
    return {'DELETING'}
  end
  if not same and (change ~= 'extend' or known[5] ~= compared) then
    return {'DIFFERS', known[1], known[2], known[3], known[4], known[5], known[6], started() and '1' or '', at,
      unpack(envs)}
  end
  -- An extension fences the trainer off.
  for _, name in ipairs(current == 'open' and alive(at) or {}) do
    if is_of_another(name) then return {'WORKING', name, redis.call('ZSCORE', ENVS, name) - at} end
  end
  local busy = open_on_stack(stack, id, at)
  if busy then return busy end
  index_unfinished(P, id, 'open')
  redis.call('HSET', RECORD, 'state', 'open', 'env', settings, 'digest', digest, 'taker', '')
  -- Its trainer does not know that there are more steps, or that another run has used the model server meanwhile.
  redis.call('HINCRBY', RECORD, 'incarnation', 1)
  redis.call('PUBLISH', EVENTS, 'open')
  log_event(same and 'resume' or 'extend')
  publish('permits')
  publish('ready')
  return {'JOINED', redis.call('HGETALL', RECORD)}
end

local untaken, abandoned = 0, nil
for _, other in ipairs(redis.call('ZRANGE', RUNS, 0, -1)) do
  local start = 'gm:{' .. other .. '}:'
  if is_untaken(start) then
    untaken = untaken + 1
    if not abandoned and is_abandoned(start, at) then abandoned = other end
  end
end
if untaken >= tonumber(most_untaken) then
  if abandoned then return {'UNTAKEN', abandoned} end
  return {'WAITING'}
end
if redis.call('ZCARD', RUNS) >= tonumber(most) then return {'FULL'} end
local busy = open_on_stack(stack, id, at)
if busy then return busy end
local fence = redis.call('GET', FENCE)
redis.call('HSET', RECORD, 'run_id', id, 'state', 'open', 'digest', digest, 'env', settings, 'group_size', group_size,
  'stack', stack, 'protocol', protocol, 'incarnation', fence and fence + 1 or 0, 'created_ms', at, 'creation', creation)
redis.call('ZADD', RUNS, at, id)
redis.call('SADD', OPEN_RUNS, id)
redis.call('PUBLISH', EVENTS, 'open')
emit('open')
return {'CREATED', redis.call('HGETALL', RECORD)}
