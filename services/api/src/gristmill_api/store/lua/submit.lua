#!lua
-- include: _keys.lua
-- include: _moves.lua
-- include: _ahead.lua
-- include: _difficulty.lua
-- Store a group and consume its permit. Not flagged allow-oom: at maxmemory Redis refuses this script, and its like.
-- The payload was set before, under a separate key: a long argument costs Lua ten times what SET costs.
-- ARGV: group id, holder, digest (32 raw bytes), sequences, tokens, env id, step, byte cap of all runs,
--       byte cap and group cap of a run, bytes of the payload, its key, result of the row or '' (_difficulty.lua), for each
--       trainer whose weights sampled the group: incarnation, first step, last step
-- -> {STORED} | {SAME} | {OTHER} | {MISSING} | {FINISHED} | {SUSPENDED} | {DROPPED, reason} | {LOST} | {UNKNOWN} | {SIZE, group size}
--  | {VERSION, incarnation, step}: never published | {SURPLUS}: the run has all groups that it needs, and the row is issued again
--  | {FULL, bytes of all runs} | {RUN_FULL, bytes of the run, groups of the run} | {GONE}: so is the payload
local id, holder, digest, sequences, tokens, env_id, step = unpack(ARGV, 1, 7)
local max_bytes, max_run_bytes, max_run_groups = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local bytes, sent, result = tonumber(ARGV[11]), ARGV[12], ARGV[13]

local function refuse(...)
  redis.call('DEL', sent)
  return {...}
end
local record = redis.call('HMGET', RECORD, 'state', 'group_size', 'incarnation')
if not record[1] then return refuse('MISSING') end
if is_of_another(holder) then return refuse(unpack(foreign(holder))) end
-- First: a retry must get the same answer, whatever happened since.
local known = redis.call('HGET', group(id), 'digest') or redis.call('HGET', TRAINED, id)
if known then return refuse(known == digest and 'SAME' or 'OTHER') end
if record[1] == 'finished' then return refuse('FINISHED') end
if record[1] == 'suspended' then return refuse('SUSPENDED') end
local reason = redis.call('HGET', DROPPED, id)
if reason then return refuse('DROPPED', reason) end
-- A permit in reissue was returned or expired, and no holder has it: the group is accepted from the holder that had it.
local by = redis.call('HGET', HOLDERS, id)
if by and by ~= holder then return refuse('LOST') end
if not by and not lapsed(id, holder) then return refuse('UNKNOWN') end
-- Fewer than the run's group size: some could not be scored. One alone has nothing to be compared with.
local size, most = tonumber(sequences), tonumber(record[2])
if size > most or size < math.min(2, most) then return refuse('SIZE', record[2]) end
-- Only weights that the model servers had. A trainer publishes weights before it records their version, so a group may be
-- one step ahead of the record, also a group of a trainer that recorded none.
local lowest, highest = unpack(redis.call('HMGET', VERSIONS, 'lowest', 'highest'))
for i = 14, lowest and #ARGV or 0, 3 do
  local trainer, first, last = unpack(ARGV, i, i + 2)
  local from, to = string.match(redis.call('HGET', VERSIONS, trainer) or '0 ' .. highest, '^(%S+) (%S+)$')
  if tonumber(first) < tonumber(from) or tonumber(trainer) < tonumber(lowest) then return refuse('VERSION', trainer, first) end
  if tonumber(last) > to + 1 or tonumber(trainer) > tonumber(record[3]) then return refuse('VERSION', trainer, last) end
end
if is_surplus(by) then
  if by then
    reissue(id)
    one_less_ahead()
  end
  return refuse('SURPLUS')
end
local held = tonumber(redis.call('GET', BYTES) or 0)
if held + bytes > max_bytes then return refuse('FULL', tostring(held)) end
local run_held = tonumber(redis.call('HGET', COUNTERS, 'bytes') or 0)
local groups = redis.call('ZCARD', READY) + redis.call('HLEN', LEASED) + redis.call('ZCARD', DEAD)
  + redis.call('LLEN', ARCHIVE)
if run_held + bytes > max_run_bytes or groups >= max_run_groups then
  return refuse('RUN_FULL', tostring(run_held), groups)
end
if redis.call('EXISTS', sent) == 0 then return {'GONE'} end

if by then
  redis.call('ZREM', PERMITS, id)
  redis.call('HDEL', HOLDERS, id)
else
  leave_reissue(id)
end
redis.call('RENAME', sent, payload(id))
redis.call('PERSIST', payload(id))
enqueue_new(id, {digest = digest, bytes = bytes, sequences = sequences, tokens = tokens,
  env_id = env_id, step = step})
count_lately('lately_accepted')
record_result(result)
return {'STORED'}
