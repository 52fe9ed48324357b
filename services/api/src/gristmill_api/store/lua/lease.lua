#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- Lease the first `count` ready groups under a batch id that the trainer chose. Returns ids and sizes only.
-- ARGV: incarnation, batch id, count, ttl ms, max attempts
-- -> {OK, group id, bytes, ...} | {WAIT} | {MISSING} | {FENCED, incarnation} | {FINISHED} | {ACKED}
local incarnation, id = ARGV[1], ARGV[2]
local count, ttl, max_attempts = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

local current = state()
if not current then return {'MISSING'} end
if fenced(incarnation) then return {'FENCED', redis.call('HGET', RECORD, 'incarnation')} end
if current == 'finished' then return {'FINISHED'} end

local function answer(ids)
  local out = {'OK'}
  for _, member in ipairs(ids) do
    out[#out + 1] = member
    out[#out + 1] = redis.call('HGET', group(member), 'bytes')
  end
  return out
end

local at = now()
-- A retry: the same batch, whether its lease still runs or ran out with nobody taking the groups.
local live, late = redis.call('ZSCORE', LEASES, id), redis.call('SISMEMBER', EXPIRED, id) == 1
if live or late then
  if late then revive(id) end
  redis.call('ZADD', LEASES, at + ttl, id)
  return answer(redis.call('LRANGE', batch(id), 0, -1))
end
if redis.call('ZSCORE', ACKED, id) then return {'ACKED'} end

reap_leases(at)
local ids
repeat
  local buried = false
  ids = redis.call('ZRANGE', READY, 0, count - 1)
  for _, member in ipairs(ids) do
    if tonumber(redis.call('HGET', group(member), 'attempts')) >= max_attempts then
      bury(member)
      buried = true
    end
  end
  if buried then tell('permits') end
until not buried
if #ids < count then return {'WAIT'} end

for _, member in ipairs(ids) do
  leave_expired(member)
  redis.call('ZREM', READY, member)
  redis.call('HSET', LEASED, member, id)
  redis.call('HINCRBY', group(member), 'attempts', 1)
  redis.call('HSET', group(member), 'batch', id)
  redis.call('RPUSH', batch(id), member)
end
redis.call('ZADD', LEASES, at + ttl, id)
return answer(ids)
