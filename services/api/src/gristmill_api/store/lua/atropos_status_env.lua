#!lua flags=allow-oom
-- include: _keys.lua
-- include: _atropos.lua
-- The facts that an environment's status is computed from (atropos/env_status.py). The cost does not grow with the queue.
-- ARGV: number, ttl ms
-- -> {UNKNOWN} | {OK, step, batch size, own max_context_len, own weight, own group size or the larger one that this or
--    an earlier call found ready, {number, max_context_len, weight, min_batch_allocation or '', ... of those that are
--    alive}, {kind, count, ...}, 1 when the run is finished}
local number, ttl = ARGV[1], tonumber(ARGV[2])

local own = redis.call('HMGET', env(number), 'max_context_len', 'weight', 'group_size', 'disconnected', 'largest')
if not own[1] then return {'UNKNOWN'} end
local at = now()
if not own[4] then touch(number, at, ttl, ttl / 10) end
local kinds = redis.call('HGETALL', READY_BY_SIZE)
local risen = math.max(tonumber(own[3]), tonumber(own[5] or 0))
local largest = risen
for i = 1, #kinds, 2 do
  local sequences, env_id = string.match(kinds[i], '^(%d+) (.*)$')
  if env_id == number then largest = math.max(largest, tonumber(sequences)) end
end
if largest > risen then redis.call('HSET', env(number), 'largest', largest) end

local envs = {}
for _, name in ipairs(alive(at)) do
  local facts = redis.call('HMGET', env(name), 'max_context_len', 'weight', 'min_batch_allocation')
  envs[#envs + 1] = name
  for i = 1, 3 do envs[#envs + 1] = facts[i] end
end
local trainer = redis.call('HMGET', ATROPOS, 'step', 'batch_size')
return {'OK', trainer[1], trainer[2], own[1], own[2], largest, envs, kinds, state() == 'finished' and 1 or 0}
