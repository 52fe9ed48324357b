-- Additional keys of a run that Atropos' protocol feeds. Environments are numbered from 0; their registrations are at envs
-- and env:<number>, as in /v1, with these additional fields:
--
--   max_context_len, min_batch_allocation, group_size (sequences, as registered), disconnected; largest (sequences of the largest
--   group that a status found ready, if more than group_size)
--
--   atropos               HASH    the trainer's registration as received; step (the current one); started, after the
--                                 first request for a batch or the first version over /v1; envs (registered so far)
--   atropos:names         HASH    desired name -> how many environments registered under it
--   atropos:buffer:<n>    LIST    "<sequences> <id>" of its groups of another size, until some sum to its group size
--   atropos:held:<id>     HASH    such a group: sequences, tokens, bytes, step, unusable; its payload is at its key
--   atropos:receipt:<id>  STRING  JSON of the answer to a submit, for the API to find when Redis' answer got lost

local ATROPOS, NAMES = P .. 'atropos', P .. 'atropos:names'

local function buffer(number) return P .. 'atropos:buffer:' .. number end
local function held(id) return P .. 'atropos:held:' .. id end
local function receipt(id) return P .. 'atropos:receipt:' .. id end

-- The answer if nothing may be written to this run, or nil.
local function write_refusal()
  local known = redis.call('HMGET', RECORD, 'state', 'protocol')
  if not known[1] then return {'MISSING'} end
  if known[1] == 'finished' then return {'FINISHED'} end
  if known[2] ~= 'atropos' then return {'PROTOCOL'} end
  return nil
end

-- Ids of an environment's buffered groups, the oldest first.
local function pieces_of(number)
  local ids = redis.call('LRANGE', buffer(number), 0, -1)
  for i, piece in ipairs(ids) do ids[i] = string.match(piece, ' (.+)$') end
  return ids
end

-- A buffered group leaves its buffer. Returns its facts; the payload stays.
local function leave_buffer(id)
  local facts = redis.call('HMGET', held(id), 'sequences', 'tokens', 'bytes', 'step', 'unusable')
  redis.call('DEL', held(id))
  redis.call('HINCRBY', COUNTERS, 'bytes', -facts[3])
  redis.call('HINCRBY', COUNTERS, 'buffered', -1)
  redis.call('DECRBY', BYTES, facts[3])
  return facts
end

-- A group enters the queue. This function and the next one need _moves.lua.
local function enqueue(id, sequences, tokens, number, length, step, unusable)
  enqueue_new(id, {digest = '', bytes = length, sequences = sequences, tokens = tokens, env_id = number, step = step})
  if unusable ~= '' then redis.call('HSET', group(id), 'unusable', unusable) end
end

local function release(id, number)
  local facts = leave_buffer(id)
  enqueue(id, facts[1], facts[2], number, facts[3], facts[4], facts[5])
end

-- Delete an environment's registration and its buffered groups. Returns about how many keys these were.
local function forget_env(number)
  local pieces = pieces_of(number)
  for _, id in ipairs(pieces) do
    leave_buffer(id)
    redis.call('DEL', payload(id))
  end
  redis.call('DEL', buffer(number), env(number))
  redis.call('ZREM', ENVS, number)
  return 1 + #pieces
end
