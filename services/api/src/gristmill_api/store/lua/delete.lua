#!lua flags=allow-oom
-- include: _keys.lua
-- include: _atropos.lua
-- Delete a finished run: every key of it. Its folder, if any, is not touched.
-- -> {MISSING} | {OPEN} | {ARCHIVING, groups left} | {OK}
local current = state()
if not current then return {'MISSING'} end
if current ~= 'finished' then return {'OPEN'} end
local waiting = redis.call('LLEN', ARCHIVE)
if waiting > 0 then return {'ARCHIVING', waiting} end

forget_protocol()
redis.call('DECRBY', BYTES, redis.call('HGET', COUNTERS, 'bytes') or 0)
redis.call('ZREM', RUNS, redis.call('HGET', RECORD, 'run_id'))
local function delete(names, ...)
  for _, name in ipairs(names) do
    for _, key in ipairs({...}) do redis.call('UNLINK', key(name)) end
  end
end
delete(redis.call('ZRANGE', READY, 0, -1), group, payload)
delete(redis.call('HKEYS', LEASED), group, payload)
delete(redis.call('ZRANGE', DEAD, 0, -1), group, payload)
delete(redis.call('LRANGE', LATEST, 0, -1), example)
delete(redis.call('ZRANGE', LEASES, 0, -1), batch)
delete(redis.call('SMEMBERS', EXPIRED), batch)
delete(redis.call('ZRANGE', ENVS, 0, -1), env)
delete(redis.call('SMEMBERS', METRICS), metrics)
redis.call('UNLINK', RECORD, COUNTERS, READY, KINDS, LEASED, DEAD, TRAINED, LEASES, EXPIRED, ACKED, DROPPED, DROPS, TOMBS,
  ENVS, CLAIMS, CLAIMANTS, LATEST, METRICS, LOG)
tell('ready')
tell('permits')
return {'OK'}
