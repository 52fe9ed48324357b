-- The moves of a submitted group between ready, leased, dead and trained.
--
--   submit -> ready -> leased -> trained        ack, or a take whose checkpoint covers it
--               ^________|                      lease expired, or a take that does not cover it
--             ready -> dead                     leased max_attempts times
--             ready -> trained                  late ack of an expired batch that nobody leased since

local function train(id)
  local facts = redis.call('HMGET', group(id), 'digest', 'bytes')
  redis.call('ZREM', READY, id)
  redis.call('HDEL', LEASED, id)
  redis.call('HSET', TRAINED, id, facts[1])
  redis.call('HINCRBY', COUNTERS, 'bytes', -facts[2])
  redis.call('DECRBY', BYTES, facts[2])
  redis.call('DEL', group(id), payload(id))
end

local function put_back(id)
  redis.call('HDEL', LEASED, id)
  redis.call('ZADD', READY, redis.call('HGET', group(id), 'seq'), id)
end

-- Forget a batch. Its groups forget it too: the trainer may use the name again.
local function dissolve(id)
  for _, member in ipairs(redis.call('LRANGE', batch(id), 0, -1)) do
    redis.call('HDEL', group(member), 'batch')
  end
  redis.call('DEL', batch(id))
end

-- The group leaves the hands of the expired batch that had it last, so that batch cannot be acked any more.
local function leave_expired(id)
  local last = redis.call('HGET', group(id), 'batch')
  if last and redis.call('SREM', EXPIRED, last) == 1 then dissolve(last) end
end

-- A dead group will never be trained: its place in the run's capacity goes to a new one.
local function bury(id)
  leave_expired(id)
  redis.call('ZREM', READY, id)
  redis.call('ZADD', DEAD, redis.call('HGET', group(id), 'seq'), id)
  redis.call('HINCRBY', COUNTERS, 'accepted', -1)
end

-- Put the groups of leases past their deadline back in their places.
local function reap_leases(at)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', at)) do
    for _, member in ipairs(redis.call('LRANGE', batch(id), 0, -1)) do put_back(member) end
    redis.call('ZREM', LEASES, id)
    redis.call('SADD', EXPIRED, id)
  end
end

-- The batch's groups, all of them in ready, are leased to it again.
local function revive(id)
  for _, member in ipairs(redis.call('LRANGE', batch(id), 0, -1)) do
    redis.call('ZREM', READY, member)
    redis.call('HSET', LEASED, member, id)
  end
  redis.call('SREM', EXPIRED, id)
end
