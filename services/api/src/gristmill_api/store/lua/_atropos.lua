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

-- A buffered group leaves its buffer. Returns its facts; the payload stays.
local function leave_buffer(id)
  local facts = redis.call('HMGET', held(id), 'sequences', 'tokens', 'bytes', 'step', 'unusable')
  redis.call('DEL', held(id))
  redis.call('HINCRBY', COUNTERS, 'bytes', -facts[3])
  redis.call('HINCRBY', COUNTERS, 'buffered', -1)
  redis.call('DECRBY', BYTES, facts[3])
  return facts
end

-- Delete an environment's registration and its buffered groups. Returns about how many keys these were.
local function forget_env(number)
  local pieces = redis.call('LRANGE', buffer(number), 0, -1)
  for _, piece in ipairs(pieces) do
    local id = string.match(piece, ' (.+)$')
    leave_buffer(id)
    redis.call('DEL', payload(id))
  end
  redis.call('DEL', buffer(number), env(number))
  redis.call('ZREM', ENVS, number)
  return 1 + #pieces
end

-- Delete the registrations and the buffered groups. The queue stays.
local function forget_protocol()
  for _, number in ipairs(redis.call('ZRANGE', ENVS, 0, -1)) do forget_env(number) end
  redis.call('DEL', ATROPOS, NAMES)
end
