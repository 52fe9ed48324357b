#!lua flags=allow-oom
-- include: _keys.lua
-- include: _atropos.lua
-- include: _life.lua
-- Delete a finished run, or continue a deletion. A long run takes several calls, so that no call blocks Redis for long.
-- Its folder, if any, is not touched.
-- ARGV: groups, batches, environments, sources and pieces of Atropos' buffers to delete in one call at most, ms for which the fence stays,
--       'begin' | 'continue': delete nothing but a run whose deletion began | 'abandoned': only a run that no trainer
--       has taken and no environment works on, '1' if the fates of groups go to disk
-- -> {MISSING} | {OPEN} | {ARCHIVING, groups and fates that wait to be written} | {MORE}: call again | {OK}
local left, fence_ttl, what, archive = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]

if redis.call('EXISTS', DELETED) == 0 then
  if what == 'continue' then return {'OK'} end
  local current = state()
  if not current then return {'MISSING'} end
  if what == 'abandoned' and not is_abandoned(P, now()) then return {'OPEN'} end
  if what == 'begin' and current ~= 'finished' then return {'OPEN'} end
  local waiting = waiting_for_disk(archive)
  if waiting > 0 then return {'ARCHIVING', waiting} end
  begin_deletion()
end

local freed = 0
local function unlink(names, key)
  for _, name in ipairs(names) do redis.call('UNLINK', key(name)) end
end
local function delete(names, key)
  unlink(names, key)
  left = left - #names
end
local function delete_groups(names)
  for _, name in ipairs(names) do freed = freed + (redis.call('HGET', group(name), 'bytes') or 0) end
  unlink(names, payload)
  delete(names, group)
end
-- The first members of a sorted set, which leave it.
local function pop(set)
  local names, popped = {}, redis.call('ZPOPMIN', set, left)
  for i = 1, #popped, 2 do names[#names + 1] = popped[i] end
  return names
end
delete_groups(pop(READY))
delete_groups(pop(DEAD))
local leased = redis.call('HRANDFIELD', LEASED, left)
if #leased > 0 then redis.call('HDEL', LEASED, unpack(leased)) end
delete_groups(leased)
delete(pop(LEASES), batch)
delete(redis.call('SPOP', EXPIRED, left), batch)
local sources = redis.call('SPOP', METRICS, left)
for _, source in ipairs(sources) do
  redis.call('DECRBY', JOURNAL, redis.call('ZSCORE', JOURNALS, metrics(source)) or 0)
  redis.call('ZREM', JOURNALS, metrics(source))
end
delete(sources, metrics)
redis.call('HINCRBY', COUNTERS, 'bytes', -freed)
redis.call('DECRBY', BYTES, freed)
while left > 0 do
  local oldest = redis.call('ZPOPMIN', ENVS)[1]
  if not oldest then break end
  left = left - forget_env(oldest)
end
if left <= 0 then return {'MORE'} end

for _, id in ipairs(redis.call('LRANGE', LATEST, 0, -1)) do delete_example(id) end
local facts = redis.call('HMGET', DELETED, 'run_id', 'incarnation')
-- Without a trainer there is nothing to fence off. For an hour, the key says that the run was deleted (run_files.py).
redis.call('SET', FENCE, facts[2], 'PX', facts[2] == '0' and 3600000 or fence_ttl)
redis.call('SREM', DELETING, facts[1])
redis.call('UNLINK', DELETED, COUNTERS, READY_BY_SIZE, TRAINED, ACKED, PERMITS, HOLDERS, REISSUE, LAPSED, DROPPED, DROPS,
  TOMBSTONES, DIFFICULTY, RESTING, FATES, VERSIONS, CLAIMS, CLAIMANTS, LATEST, RUN_EVENTS, ATROPOS, NAMES)
return {'OK'}
