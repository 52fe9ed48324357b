#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- include: _atropos.lua
-- include: _sums.lua
-- include: _packing.lua
-- Lease the next batch, of exactly the registered batch size, for as long as it takes to send it.
-- Groups that no batch can hold become dead letters: larger than a batch, or delivered too often.
-- ARGV: batch id, ttl ms, max attempts, silence ms after which an environment's share is not kept
-- -> {UNREGISTERED} | {NONE, dead letters} | {OK, dead letters, group id, bytes, ...}
local id, ttl, max_attempts, silence = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local trainer = redis.call('HMGET', ATROPOS, 'batch_size', 'started')
if not trainer[1] then return {'UNREGISTERED'} end
if not trainer[2] then redis.call('HSET', ATROPOS, 'started', 1) end

local at, set_aside = now(), 0
local function answer(ids)
  local out = {'OK', set_aside}
  for _, member in ipairs(ids) do
    out[#out + 1] = member
    out[#out + 1] = redis.call('HGET', group(member), 'bytes')
  end
  return out
end

-- The same id again, after a lost answer: the same batch.
local late = redis.call('SISMEMBER', EXPIRED, id) == 1
if late or redis.call('ZSCORE', LEASES, id) then
  if late then revive(id) end
  redis.call('ZADD', LEASES, at + ttl, id)
  return answer(redis.call('LRANGE', batch(id), 0, -1))
end
reap_leases(at)

local function give_up(member, reason)
  bury(member, reason)
  set_aside = set_aside + 1
end

local wanted = tonumber(trainer[1])
local shares, connected = {}, living(at, silence)
if #connected > 0 then
  for i, share in ipairs(redis.call('HMGET', MINIMA, unpack(connected))) do
    if share then shares[#shares + 1] = {env_id = connected[i], share = tonumber(share)} end
  end
end

local chosen
repeat
  local clean = true
  local kinds, largest = read_kinds()
  if wanted < 1 or tonumber(redis.call('HGET', COUNTERS, 'ready_sequences') or 0) < wanted then break end
  if largest > wanted then
    local queue = reader(256)
    while queue.more() do end
    for _, one in ipairs(queue.groups) do
      if one.size > wanted then give_up(one.id, 'larger_than_a_batch') end
    end
    clean = false
  else
    chosen = next_batch(kinds, largest, wanted, shares)
    for _, one in ipairs(chosen or {}) do
      if one.attempts >= max_attempts then
        give_up(one.id, 'undeliverable')
        clean = false
      end
    end
  end
until clean
if not chosen then return {'NONE', set_aside} end

local ids = {}
for i, one in ipairs(chosen) do ids[i] = one.id end
lend(ids, id)
redis.call('ZADD', LEASES, at + ttl, id)
emit('lease', 'batch', id, 'groups', #ids)
return answer(ids)
