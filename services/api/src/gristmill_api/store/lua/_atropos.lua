-- Additional keys of a run that Atropos' protocol feeds. Environments are numbered from 0.
--
--   atropos               HASH    the trainer's registration as received; step (the current one); started, after the
--                                 first request for a batch or the first version over /v1
--   atropos:envs          HASH    number -> JSON of the registration (max_context_len, weight, wandb_name)
--   atropos:names         HASH    desired name -> how many environments registered under it
--   atropos:group_sizes   HASH    number -> sequences a group; rises to the largest that the environment has ready
--   atropos:minima        HASH    number -> the share of every batch that must be its own
--   atropos:disconnected  SET     numbers
--   atropos:heard         ZSET    number -> ms of its last request
--   atropos:buffer:<n>    LIST    "<sequences> <id>" of its groups of another size, until some sum to its group size
--   atropos:held:<id>     HASH    such a group: sequences, tokens, bytes, step, version; its payload is at its key
--   atropos:receipt:<id>  STRING  JSON of the answer to a submit, for the API to find when Redis' answer got lost

local ATROPOS, NUMBERED, NAMES = P .. 'atropos', P .. 'atropos:envs', P .. 'atropos:names'
local GROUP_SIZES, MINIMA = P .. 'atropos:group_sizes', P .. 'atropos:minima'
local DISCONNECTED, HEARD = P .. 'atropos:disconnected', P .. 'atropos:heard'

local function buffer(number) return P .. 'atropos:buffer:' .. number end
local function held(id) return P .. 'atropos:held:' .. id end
local function receipt(id) return P .. 'atropos:receipt:' .. id end

-- The answer if nothing may be written to this run, or nil.
local function barred()
  local known = redis.call('HMGET', RECORD, 'state', 'protocol')
  if not known[1] then return {'MISSING'} end
  if known[1] == 'finished' then return {'FINISHED'} end
  if known[2] ~= 'atropos' then return {'PROTOCOL'} end
  return nil
end

-- Record that the environment is alive. It asks ten times per second and every write is an fsync, so a time that was
-- written in the last `fresh` ms stays.
local function hear(number, at, fresh)
  local last = redis.call('ZSCORE', HEARD, number)
  if not last or at - last > fresh then redis.call('ZADD', HEARD, at, number) end
end

-- Numbers of the environments that count, in order: connected, with a request in the last `silence` ms.
local function living(at, silence)
  local numbers = redis.call('ZRANGEBYSCORE', HEARD, '(' .. (at - silence), '+inf')
  table.sort(numbers, function(a, b) return tonumber(a) < tonumber(b) end)
  local connected = {}
  for _, number in ipairs(numbers) do
    if redis.call('SISMEMBER', DISCONNECTED, number) == 0 then connected[#connected + 1] = number end
  end
  return connected
end

-- A buffered group leaves its buffer. Returns its facts; the payload stays.
local function unhold(id)
  local facts = redis.call('HMGET', held(id), 'sequences', 'tokens', 'bytes', 'step', 'version')
  redis.call('DEL', held(id))
  redis.call('HINCRBY', COUNTERS, 'bytes', -facts[3])
  redis.call('DECRBY', BYTES, facts[3])
  return facts
end

-- Delete an environment's registration and its buffered groups. Returns about how many keys these were.
local function forget_env(number)
  local pieces = redis.call('LRANGE', buffer(number), 0, -1)
  for _, piece in ipairs(pieces) do
    local id = string.match(piece, ' (.+)$')
    unhold(id)
    redis.call('DEL', payload(id))
  end
  redis.call('DEL', buffer(number))
  redis.call('HDEL', NUMBERED, number)
  return 1 + #pieces
end

-- Delete the registrations and the buffered groups. The queue stays.
local function forget_protocol()
  for _, number in ipairs(redis.call('HKEYS', NUMBERED)) do forget_env(number) end
  redis.call('DEL', ATROPOS, NUMBERED, NAMES, GROUP_SIZES, MINIMA, DISCONNECTED, HEARD)
end
