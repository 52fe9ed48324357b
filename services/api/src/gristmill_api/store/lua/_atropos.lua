-- What a run fed by Atropos' protocol keeps beside the store's own keys. Environments are numbered from 0.
--
--   atropos               HASH    the trainer's registration as it came; step (the current one); started, after the
--                                 first request for a batch or the first version over /v1
--   atropos:envs          HASH    number -> JSON of what it registered (max_context_len, weight, wandb_name)
--   atropos:names         HASH    desired name -> how many environments registered under it
--   atropos:group_sizes   HASH    number -> sequences a group; rises to the largest that the environment has ready
--   atropos:minima        HASH    number -> the share of every batch that must be its own
--   atropos:disconnected  SET     numbers
--   atropos:heard         ZSET    number -> ms when it last spoke
--   atropos:buffer:<n>    LIST    "<sequences> <id>" of its groups of another size, until some sum to its group size
--   atropos:held:<id>     HASH    such a group: sequences, tokens, bytes, step, version; its payload is at its key
--   atropos:receipt:<id>  STRING  JSON of the answer to a submit, for the API to find when Redis' answer got lost

local ATROPOS, NUMBERED, NAMES = P .. 'atropos', P .. 'atropos:envs', P .. 'atropos:names'
local GROUP_SIZES, MINIMA = P .. 'atropos:group_sizes', P .. 'atropos:minima'
local DISCONNECTED, HEARD = P .. 'atropos:disconnected', P .. 'atropos:heard'

local function buffer(number) return P .. 'atropos:buffer:' .. number end
local function held(id) return P .. 'atropos:held:' .. id end
local function receipt(id) return P .. 'atropos:receipt:' .. id end

-- Why nothing may be written here: the answer to give, or nil.
local function barred()
  local known = redis.call('HMGET', RECORD, 'state', 'protocol')
  if not known[1] then return {'MISSING'} end
  if known[1] == 'finished' then return {'FINISHED'} end
  if known[2] ~= 'atropos' then return {'PROTOCOL'} end
  return nil
end

-- The environment lives. It asks ten times a second and every write is an fsync, so what was written down in the last
-- `fresh` ms is good enough.
local function hear(number, at, fresh)
  local last = redis.call('ZSCORE', HEARD, number)
  if not last or at - last > fresh then redis.call('ZADD', HEARD, at, number) end
end

-- Numbers of the environments that count: connected, and heard from in the last `silence` ms. In order.
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

-- Forget an environment's registration and what it has buffered. How many keys these were, about.
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

-- Forget the registrations and what is buffered. The queue stays.
local function forget_protocol()
  for _, number in ipairs(redis.call('HKEYS', NUMBERED)) do forget_env(number) end
  redis.call('DEL', ATROPOS, NUMBERED, NAMES, GROUP_SIZES, MINIMA, DISCONNECTED, HEARD)
end
