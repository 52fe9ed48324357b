#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- A trainer takes the run: fence the one before, settle what its checkpoint covers, put everything else back.
-- ARGV: trainer (canonical JSON), groups per step, training steps, max staleness, archive '1'|'',
--       creation of the run that the checkpoint was made in or '', steps of the checkpoint or '', taker (the call's own
--       word, the same in its repetitions) or '', covered group ids...
-- -> {OK, record...} | {MISSING} | {FINISHED} | {DIFFERS, trainer} | {OTHER, creation of this run}
local trainer, groups_per_step, training_steps, max_staleness, archive, creation, steps, taker = unpack(ARGV, 1, 8)

local current = state()
if not current then return {'MISSING'} end
if current == 'finished' then return {'FINISHED'} end
local known = redis.call('HGET', RECORD, 'trainer')
if known and known ~= trainer then return {'DIFFERS', known} end
-- Group ids start again with each creation of a run: the checkpoint's may be groups of a run that was deleted. A run that
-- an older version of this API created has no creation to compare.
local own = redis.call('HGET', RECORD, 'creation')
if own and creation ~= '' and creation ~= own then return {'OTHER', own} end

-- The answer to the first call was lost, or the network sent it twice. A second incarnation would fence off its caller.
if taker ~= '' and redis.call('HGET', RECORD, 'taker') == taker then return {'OK', redis.call('HGETALL', RECORD)} end

redis.call('HSET', RECORD, 'taker', taker, 'trainer', trainer, 'groups_per_step', groups_per_step,
  'training_steps', training_steps, 'max_staleness', max_staleness)
redis.call('HINCRBY', RECORD, 'incarnation', 1)
for i = 9, #ARGV do
  local id = ARGV[i]
  local dead = redis.call('ZSCORE', DEAD, id)
  -- Its last delivery was trained on, and its lease ran out before the ack: replayed, it would be trained twice.
  if dead then redis.call('HINCRBY', COUNTERS, 'accepted', 1) end
  if dead or redis.call('ZSCORE', READY, id) or redis.call('HEXISTS', LEASED, id) == 1 then train(id, archive) end
end
for _, id in ipairs(redis.call('HKEYS', LEASED)) do put_back(id) end
-- Batch ids belong to an incarnation; the new one may use the same names again.
for _, id in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do dissolve(id) end
for _, id in ipairs(redis.call('SMEMBERS', EXPIRED)) do dissolve(id) end
redis.call('DEL', LEASES, EXPIRED, ACKED)
-- A trainer that goes back beyond its last ack trains those steps anew, on new groups: what was trained in them is in
-- no weights any more, and would hold their permits for ever.
if steps ~= '' then
  local accepted = steps * groups_per_step + redis.call('ZCARD', READY)
  if accepted < tonumber(redis.call('HGET', COUNTERS, 'accepted') or 0) then
    redis.call('HSET', COUNTERS, 'accepted', accepted)
  end
end
note('take', 'incarnation', redis.call('HGET', RECORD, 'incarnation'))
tell('permits')
tell('ready')
if archive == '1' then tell('archive') end
return {'OK', redis.call('HGETALL', RECORD)}
