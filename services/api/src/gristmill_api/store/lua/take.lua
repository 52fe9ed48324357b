#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- include: _life.lua
-- include: _atropos.lua
-- A trainer takes the run: fence the one before, settle what its checkpoint covers, put everything else back. Other
-- settings than the trainer before are refused once a step is finished, except more training steps: the API compares, and
-- names the settings that it compared with. They open a finished or suspended run again if its stack has no open run.
-- ARGV: trainer (canonical JSON), groups per step, training steps, max staleness, archive '1'|'',
--       compared trainer or '', creation of the run that the checkpoint was made in or '', steps of the checkpoint or '',
--       taker (the call's own word, the same in its repetitions) or '', covered group ids...
-- -> {OK, record...} | {MISSING} | {DIFFERS, trainer} | {FINISHED} | {SUSPENDED} | {OTHER, creation of this run}
--  | {BUSY, open run id}
local trainer, groups_per_step, training_steps, max_staleness, archive, compared = unpack(ARGV, 1, 6)
local creation, steps, taker = unpack(ARGV, 7, 9)

local current = state()
if not current then return {'MISSING'} end
local known = redis.call('HGET', RECORD, 'trainer')
local extends = known ~= trainer and known == compared
if known and known ~= trainer and not extends and started() then return {'DIFFERS', known} end
if current ~= 'open' and not extends then return {string.upper(current)} end
-- Group ids start again with each creation of a run: the checkpoint's may be groups of a run that was deleted. A run that
-- an older version of this API created has no creation to compare.
local own = redis.call('HGET', RECORD, 'creation')
if own and creation ~= '' and creation ~= own then return {'OTHER', own} end
if current ~= 'open' then
  local place = redis.call('HMGET', RECORD, 'stack', 'run_id')
  local open = redis.call('HGET', STACKS, place[1])
  if open then return {'BUSY', open} end
  open_on_stack(place[1], place[2], now())
  redis.call('HSET', RECORD, 'state', 'open')
  index_unfinished(P, place[2], 'open')
end

-- The answer to the first call was lost, or the network sent it twice. A second incarnation would fence off its caller.
if taker ~= '' and redis.call('HGET', RECORD, 'taker') == taker then return {'OK', redis.call('HGETALL', RECORD)} end

redis.call('HSET', RECORD, 'taker', taker, 'trainer', trainer, 'groups_per_step', groups_per_step,
  'training_steps', training_steps, 'max_staleness', max_staleness)
redis.call('HINCRBY', RECORD, 'incarnation', 1)
-- Atropos' environments read the registration, which may be an earlier trainer's. Their run has a group_size of 1.
if redis.call('EXISTS', ATROPOS) == 1 then
  redis.call('HSET', ATROPOS, 'batch_size', groups_per_step, 'num_steps', training_steps)
end
for i = 10, #ARGV do
  local id = ARGV[i]
  local dead = redis.call('ZSCORE', DEAD, id)
  -- Its last delivery was trained on, and its lease ran out before the ack: replayed, it would be trained twice.
  if dead then redis.call('HINCRBY', COUNTERS, 'accepted', 1) end
  if dead or redis.call('ZSCORE', READY, id) or redis.call('HEXISTS', LEASED, id) == 1 then train(id, archive) end
end
for _, id in ipairs(redis.call('HKEYS', LEASED)) do return_to_ready(id) end
-- Batch ids belong to an incarnation; the new one may use the same names again.
for _, id in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do delete_batch(id) end
for _, id in ipairs(redis.call('SMEMBERS', EXPIRED)) do delete_batch(id) end
redis.call('DEL', LEASES, EXPIRED, ACKED)
-- A trainer that goes back beyond its last ack trains those steps again, on new groups. The old groups of those steps
-- are in no weights any more, and would hold their permits for ever. The recorded version is of a later step, so permits
-- wait for the first version of this trainer.
if steps ~= '' then
  if tonumber(steps) < tonumber(redis.call('HGET', RECORD, 'version_step') or 0) then
    redis.call('HSET', RECORD, 'went_back', 1)
  end
  local accepted = steps * groups_per_step + redis.call('ZCARD', READY)
  if accepted < tonumber(redis.call('HGET', COUNTERS, 'accepted') or 0) then
    redis.call('HSET', COUNTERS, 'accepted', accepted)
  end
end
log_event('take', 'incarnation', redis.call('HGET', RECORD, 'incarnation'))
publish('permits')
publish('ready')
if archive == '1' then publish('archive') end
return {'OK', redis.call('HGETALL', RECORD)}
