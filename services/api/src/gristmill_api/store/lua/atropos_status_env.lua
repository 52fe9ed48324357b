#!lua flags=allow-oom
-- include: _keys.lua
-- include: _atropos.lua
-- The facts that an environment's status is computed from (atropos/figures.py). Constant cost whatever the queue holds.
-- ARGV: number, silence ms after which an environment does not count
-- -> {UNKNOWN} | {OK, step, batch size, own group size, own facts, {facts of those that count...},
--    {number, share, ... of those that count and have one}, {kind, count, ...}, 1 when the run is finished}
local number = ARGV[1]

local own = redis.call('HGET', NUMBERED, number)
if not own then return {'UNKNOWN'} end
local at, silence = now(), tonumber(ARGV[2])
hear(number, at, silence / 10)
local kinds = redis.call('HGETALL', KINDS)
local size = tonumber(redis.call('HGET', GROUP_SIZES, number))
local largest = size
for i = 1, #kinds, 2 do
  local sequences, env_id = string.match(kinds[i], '^(%d+) (.*)$')
  if env_id == number then largest = math.max(largest, tonumber(sequences)) end
end
if largest > size then redis.call('HSET', GROUP_SIZES, number, largest) end

local connected, facts, shares = living(at, silence), {}, {}
if #connected > 0 then
  facts = redis.call('HMGET', NUMBERED, unpack(connected))
  for i, share in ipairs(redis.call('HMGET', MINIMA, unpack(connected))) do
    if share then
      shares[#shares + 1] = connected[i]
      shares[#shares + 1] = share
    end
  end
end
local trainer = redis.call('HMGET', ATROPOS, 'step', 'batch_size')
return {'OK', trainer[1], trainer[2], largest, own, facts, shares, kinds,
  state() == 'finished' and 1 or 0}
