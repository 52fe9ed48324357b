-- The moves of a group between ready, leased, dead, trained and dropped. Every one of them keeps the counts.
--
--   submit -> ready -> leased -> trained        ack, or a take whose checkpoint covers it
--               ^________|                      lease expired, given back, or a take that does not cover it
--             ready -> dead -> ready | dropped  leased max_attempts times; then replayed or purged
--             ready -> dropped                  Atropos' trainer resets the run
--             ready -> trained                  late ack of an expired batch that was not leased since
--              dead -> trained                  a take whose checkpoint covers it: its last ack came too late

local MAX_TOMBSTONES, MAX_DEAD, MAX_LATEST, MAX_FATES = 65536, 1024, 8, 65536
local MAX_EXAMPLE_BYTES, EXAMPLE_MS, MAX_EXAMPLES = 1048576, 86400000, 256

local function count(where, sequences, bytes, sign)
  redis.call('HINCRBY', COUNTERS, where .. '_sequences', sign * sequences)
  redis.call('HINCRBY', COUNTERS, where .. '_bytes', sign * bytes)
end

-- Add to the count of ready groups of this size and environment. So a batch can be planned without reading the queue.
local function count_ready(key, groups)
  if redis.call('HINCRBY', READY_BY_SIZE, key, groups) == 0 then redis.call('HDEL', READY_BY_SIZE, key) end
end
local function size_and_env(sequences, env_id) return sequences .. ' ' .. env_id end

-- Record what became of a group, for the file of the run: dropped, dead, replayed or let_go. The group's hash may be gone.
local function log_fate(id, what, reason, env_id)
  local facts = redis.call('HMGET', group(id), 'env_id', 'step', 'sequences')
  redis.call('RPUSH', FATES, cjson.encode({group_id = id, what = what, reason = reason, env_id = env_id or facts[1] or nil,
    step = tonumber(facts[2] or nil), sequences = tonumber(facts[3] or nil), time_ms = now()}))
  if redis.call('LLEN', FATES) > MAX_FATES then redis.call('LPOP', FATES) end
end

-- Take the group out of the state it is in. Returns the state, sequences, bytes, environment.
local function leave_state(id)
  local facts = redis.call('HMGET', group(id), 'sequences', 'bytes', 'env_id')
  local where = 'dead'
  if redis.call('ZREM', READY, id) == 1 then
    where = 'ready'
    count_ready(size_and_env(facts[1], facts[3]), -1)
  elseif redis.call('HDEL', LEASED, id) == 1 then
    where = 'leased'
  else
    redis.call('ZREM', DEAD, id)
  end
  count(where, facts[1], facts[2], -1)
  return where, facts[1], facts[2], facts[3]
end

-- Add a tombstone; if there are too many, delete the oldest. Its permit is used up, so the group cannot be sent again.
local function add_tombstone(id)
  redis.call('RPUSH', TOMBSTONES, id)
  if redis.call('LLEN', TOMBSTONES) > MAX_TOMBSTONES then
    local oldest = redis.call('LPOP', TOMBSTONES)
    redis.call('HDEL', TRAINED, oldest)
    redis.call('HDEL', DROPPED, oldest)
  end
end

-- Delete the group's bytes. The latest examples are kept for a day. No limit of bytes counts them, so large ones are
-- deleted, and the oldest of all runs if there are too many.
local function delete_group(id)
  local bytes = redis.call('HGET', group(id), 'bytes')
  redis.call('HINCRBY', COUNTERS, 'bytes', -bytes)
  redis.call('DECRBY', BYTES, bytes)
  if tonumber(bytes) <= MAX_EXAMPLE_BYTES and redis.call('LPOS', LATEST, id) then
    redis.call('RENAME', payload(id), example(id))
    redis.call('PEXPIRE', example(id), EXAMPLE_MS)
    redis.call('ZADD', EXAMPLES, now(), example(id))
    if redis.call('ZCARD', EXAMPLES) > MAX_EXAMPLES then redis.call('DEL', redis.call('ZPOPMIN', EXAMPLES)[1]) end
  else
    redis.call('DEL', payload(id))
  end
  redis.call('DEL', group(id))
end

-- A new group, whose payload is there, is ready, the last in the queue.
-- facts: digest, bytes, sequences, tokens, env_id, step.
local function enqueue_new(id, facts)
  local seq = redis.call('HINCRBY', COUNTERS, 'seq', 1)
  redis.call('HSET', group(id), 'digest', facts.digest, 'bytes', facts.bytes, 'sequences', facts.sequences, 'env_id',
    facts.env_id, 'step', facts.step, 'seq', seq, 'at', now(), 'attempts', 0)
  redis.call('ZADD', READY, seq, id)
  count('ready', facts.sequences, facts.bytes, 1)
  count_ready(size_and_env(facts.sequences, facts.env_id), 1)
  redis.call('HINCRBY', COUNTERS, 'accepted', 1)
  redis.call('HSET', COUNTERS, 'submitted_ms', now())
  redis.call('HINCRBY', COUNTERS, 'bytes', facts.bytes)
  redis.call('INCRBY', BYTES, facts.bytes)
  if redis.call('LPUSH', LATEST, id) > MAX_LATEST then delete_example(redis.call('RPOP', LATEST)) end
  log_event('submit', 'group', id, 'env', facts.env_id, 'sequences', facts.sequences, 'tokens', facts.tokens)
  publish('ready')
end

-- archive: '1' when the group is to be written to the archive before its bytes go.
local function train(id, archive)
  leave_state(id)
  redis.call('HSET', TRAINED, id, redis.call('HGET', group(id), 'digest'))
  redis.call('HINCRBY', COUNTERS, 'trained', 1)
  add_tombstone(id)
  if archive == '1' then
    redis.call('RPUSH', ARCHIVE, id)
  else
    delete_group(id)
  end
end

local function record_drop(id, reason)
  redis.call('HSET', DROPPED, id, reason)
  redis.call('HINCRBY', DROPS, reason, 1)
  add_tombstone(id)
  log_fate(id, 'dropped', reason)
  log_event('drop', 'group', id, 'reason', reason)
  publish('permits')
end

-- Drop a ready or dead group. A new group takes its place in the run's capacity.
local function drop(id, reason)
  local where = leave_state(id)
  if where ~= 'dead' then redis.call('HINCRBY', COUNTERS, 'accepted', -1) end
  record_drop(id, reason)
  delete_group(id)
end

local function return_to_ready(id)
  local _, sequences, bytes, env_id = leave_state(id)
  redis.call('ZADD', READY, redis.call('HGET', group(id), 'seq'), id)
  count('ready', sequences, bytes, 1)
  count_ready(size_and_env(sequences, env_id), 1)
end

-- Forget a batch. Its groups forget it too: the trainer may use the name again.
local function delete_batch(id)
  for _, member in ipairs(redis.call('LRANGE', batch(id), 0, -1)) do
    redis.call('HDEL', group(member), 'batch')
  end
  redis.call('DEL', batch(id))
end

-- Remove the group from the expired batch that had it last. That batch cannot be acked any more.
local function leave_expired(id)
  local last = redis.call('HGET', group(id), 'batch')
  if last and redis.call('SREM', EXPIRED, last) == 1 then delete_batch(last) end
end

-- Lease ready groups as a batch. All changes are written at once, because a trainer waits for them.
local function lease_groups(ids, batch_id)
  local sequences, bytes, redeliveries, leased_by_size, leased = 0, 0, 0, {}, {}
  for i, id in ipairs(ids) do
    leave_expired(id)
    local facts = redis.call('HMGET', group(id), 'sequences', 'bytes', 'env_id', 'attempts')
    sequences, bytes = sequences + facts[1], bytes + facts[2]
    local key = size_and_env(facts[1], facts[3])
    leased_by_size[key] = (leased_by_size[key] or 0) + 1
    if facts[4] ~= '0' then redeliveries = redeliveries + 1 end
    redis.call('HSET', group(id), 'attempts', facts[4] + 1, 'batch', batch_id)
    leased[2 * i - 1], leased[2 * i] = id, batch_id
  end
  local CHUNK = 1024 -- what Lua can unpack has a bound
  for i = 1, #ids, CHUNK do
    local last = math.min(i + CHUNK - 1, #ids)
    redis.call('ZREM', READY, unpack(ids, i, last))
    redis.call('HSET', LEASED, unpack(leased, 2 * i - 1, 2 * last))
    redis.call('RPUSH', batch(batch_id), unpack(ids, i, last))
  end
  for key, groups in pairs(leased_by_size) do count_ready(key, -groups) end
  count('ready', sequences, bytes, -1)
  count('leased', sequences, bytes, 1)
  if redeliveries > 0 then redis.call('HINCRBY', COUNTERS, 'redeliveries', redeliveries) end
end

-- A dead group is not trained unless a request replays it: a new group takes its place in the run's capacity.
local function make_dead(id, reason)
  leave_expired(id)
  local _, sequences, bytes = leave_state(id)
  redis.call('ZADD', DEAD, redis.call('HGET', group(id), 'seq'), id)
  redis.call('HSET', group(id), 'reason', reason)
  redis.call('HINCRBY', COUNTERS, 'accepted', -1)
  count('dead', sequences, bytes, 1)
  log_event('dead', 'group', id, 'reason', reason)
  log_fate(id, 'dead', reason)
  publish('permits')
  if redis.call('ZCARD', DEAD) > MAX_DEAD then drop(redis.call('ZRANGE', DEAD, 0, 0)[1], 'dead_letters_full') end
end

-- Put the groups of leases past their deadline back in their places.
local function expire_leases(at)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', at)) do
    for _, member in ipairs(redis.call('LRANGE', batch(id), 0, -1)) do return_to_ready(member) end
    redis.call('ZREM', LEASES, id)
    redis.call('SADD', EXPIRED, id)
    redis.call('HINCRBY', COUNTERS, 'expiries', 1)
    emit('expire', 'batch', id)
  end
end

-- The batch's groups, all of them in ready, are leased to it again.
local function revive(id)
  for _, member in ipairs(redis.call('LRANGE', batch(id), 0, -1)) do
    local _, sequences, bytes = leave_state(member)
    redis.call('HSET', LEASED, member, id)
    count('leased', sequences, bytes, 1)
  end
  redis.call('SREM', EXPIRED, id)
end
