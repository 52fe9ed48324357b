#!lua
-- include: _keys.lua
-- include: _moves.lua
-- Store a group and consume its permit. Not flagged allow-oom: at maxmemory Redis refuses this script, and only this.
-- ARGV: group id, holder, digest (32 raw bytes), sequences, tokens, raw bytes, env id, step, byte cap of all runs,
--       byte cap and group cap of a run, payload
-- -> {STORED} | {SAME} | {OTHER} | {MISSING} | {FINISHED} | {DROPPED, reason} | {LOST} | {UNKNOWN} | {SIZE, group size}
--  | {FULL, bytes of all runs} | {RUN_FULL, bytes of the run, groups of the run}
local id, holder, digest, sequences, tokens, raw_bytes, env_id, step = unpack(ARGV, 1, 8)
local max_bytes, max_run_bytes, max_run_groups, body = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), ARGV[12]

local current = state()
if not current then return {'MISSING'} end
-- First of all: a retry must hear the same answer whatever happened since.
local known = redis.call('HGET', group(id), 'digest') or redis.call('HGET', TRAINED, id)
if known then
  if known == digest then return {'SAME'} end
  return {'OTHER'}
end
if current == 'finished' then return {'FINISHED'} end
local reason = redis.call('HGET', DROPPED, id)
if reason then return {'DROPPED', reason} end
-- A permit in reissue was given back or expired, and nobody holds it: the work done under it is welcome.
local by = redis.call('HGET', HOLDERS, id)
if by and by ~= holder then return {'LOST'} end
if not by and not redis.call('ZSCORE', REISSUE, id) then return {'UNKNOWN'} end
local group_size = redis.call('HGET', RECORD, 'group_size')
if group_size ~= sequences then return {'SIZE', group_size} end
local held = tonumber(redis.call('GET', BYTES) or 0)
if held + #body > max_bytes then return {'FULL', tostring(held)} end
local run_held = tonumber(redis.call('HGET', COUNTERS, 'bytes') or 0)
local groups = redis.call('ZCARD', READY) + redis.call('HLEN', LEASED) + redis.call('ZCARD', DEAD)
  + redis.call('LLEN', ARCHIVE)
if run_held + #body > max_run_bytes or groups >= max_run_groups then return {'RUN_FULL', tostring(run_held), groups} end

redis.call('ZREM', PERMITS, id)
redis.call('HDEL', HOLDERS, id)
redis.call('ZREM', REISSUE, id)
redis.call('SET', payload(id), body)
admit(id, {digest = digest, schema = 'group', bytes = #body, raw_bytes = raw_bytes, sequences = sequences,
  tokens = tokens, env_id = env_id, step = step})
return {'STORED'}
