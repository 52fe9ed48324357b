#!lua
-- include: _keys.lua
-- include: _moves.lua
-- include: _atropos.lua
-- Store groups, all of them or none. A group whose size is not its environment's waits in a buffer until some of them
-- sum to that size. Not flagged allow-oom: at maxmemory Redis refuses this script.
-- The payloads were set before, under separate keys: a long argument costs Lua ten times what SET costs. If they are
-- not there, the answer is GONE if there is room for them. Any answer that does not store them deletes them.
-- A payload names the version of the weights, which must be the one that is served. Its id and row are written here.
-- ARGV: receipt, its ttl ms, byte cap of all runs, byte cap and group cap of a run, bytes of all payloads, an
--       environment's ttl ms, version in the payloads, length of an id in them, then for each group: sequences, tokens,
--       environment's number or '', payload's key, names of the fields left out with commas, why no trainer of /v1 can
--       use it or '', offsets of id and row in the payload
-- -> {MISSING} | {FINISHED} | {PROTOCOL} | {FULL, bytes of all runs} | {RUN_FULL, bytes of the run, groups of the run}
--  | {GONE} | {VERSION, the one that is served} | {NAMES, groups so far}: the next id is longer
--  | {OK, a number per group: -1 received, else buffered, with the sequences in the buffer}
local id, ttl = ARGV[1], ARGV[2]
local max_bytes, max_run_bytes, max_run_groups = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local bytes, env_ttl, name_length = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[9])
local FIRST, FACTS = 10, 8
-- A buffer whose pieces never sum must not grow for ever: its oldest goes to the queue as it is. So does the oldest of
-- pieces whose sums are too many to try: pieces times group size. A call tries MAX_CALL_SUMS in all.
local MAX_PIECES, MAX_SUMS, MAX_CALL_SUMS = 64, 262144, 4194304
local sums_left = MAX_CALL_SUMS

local function without_storing(answer)
  for i = FIRST, #ARGV, FACTS do redis.call('DEL', ARGV[i + 3]) end
  return answer
end
local earlier = redis.call('GET', receipt(id))
if earlier then return without_storing({'OK', cjson.decode(earlier)}) end
local refused = write_refusal()
if refused then return without_storing(refused) end
local recorded = redis.call('HMGET', RECORD, 'version_incarnation', 'version_step')
local step, version = recorded[2] or '', '0.0'
if recorded[1] then version = recorded[1] .. '.' .. recorded[2] end
if version ~= ARGV[8] then return without_storing({'VERSION', version}) end

local function name_of(row) return string.format('a%08d', row) end
local groups = (#ARGV - FIRST + 1) / FACTS
local rows = tonumber(redis.call('HGET', COUNTERS, 'rows') or 0)
if #name_of(rows + groups - 1) > name_length then return without_storing({'NAMES', rows}) end
local all = tonumber(redis.call('GET', BYTES) or 0)
if all + bytes > max_bytes then return without_storing({'FULL', tostring(all)}) end
local of_run = tonumber(redis.call('HGET', COUNTERS, 'bytes') or 0)
local there = redis.call('ZCARD', READY) + redis.call('HLEN', LEASED) + redis.call('ZCARD', DEAD)
  + redis.call('LLEN', ARCHIVE) + (redis.call('HGET', COUNTERS, 'buffered') or 0)
if of_run + bytes > max_run_bytes or there + groups > max_run_groups then
  return without_storing({'RUN_FULL', tostring(of_run), there})
end
for i = FIRST, #ARGV, FACTS do
  if redis.call('EXISTS', ARGV[i + 3]) == 0 then return without_storing({'GONE'}) end
end

-- Indices of pieces that sum to `target`: the first ones that fit, else any that do, the later the rather. nil: none do,
-- or the sums are too many to try.
local function summing(sizes, target)
  local sum, chosen = 0, {}
  for i, size in ipairs(sizes) do
    if sum + size <= target then
      sum = sum + size
      chosen[i] = true
      if sum == target then return chosen end
    end
  end
  local sums = #sizes * target
  if sums > MAX_SUMS or sums > sums_left then return nil end
  sums_left = sums_left - sums
  -- reach[i][j]: some of the first i pieces sum to j
  local reach = {[0] = {[0] = true}}
  for i, size in ipairs(sizes) do
    reach[i] = {}
    for j = 0, target do
      reach[i][j] = reach[i - 1][j] or reach[i - 1][j - size]
    end
  end
  if not reach[#sizes][target] then return nil end
  chosen = {}
  local left = target
  for i = #sizes, 1, -1 do
    if left >= sizes[i] and reach[i - 1][left - sizes[i]] then
      chosen[i] = true
      left = left - sizes[i]
    end
  end
  return chosen
end

-- Hold a piece; release those that sum to the environment's group size now. Returns sequences left in the buffer.
local function hold(name, number, target, sequences, tokens, length, unusable)
  redis.call('HSET', held(name), 'sequences', sequences, 'tokens', tokens, 'bytes', length, 'step', step, 'unusable',
    unusable)
  redis.call('HINCRBY', COUNTERS, 'bytes', length)
  redis.call('HINCRBY', COUNTERS, 'buffered', 1)
  redis.call('INCRBY', BYTES, length)
  redis.call('RPUSH', buffer(number), sequences .. ' ' .. name)
  local pieces, sizes = redis.call('LRANGE', buffer(number), 0, -1), {}
  for i, piece in ipairs(pieces) do sizes[i] = tonumber(string.match(piece, '^%d+')) end
  local chosen = summing(sizes, target)
  if not chosen and (#pieces > MAX_PIECES or #pieces * target > MAX_SUMS) then chosen = {true} end
  local left = 0
  for i, piece in ipairs(pieces) do
    if chosen and chosen[i] then
      redis.call('LREM', buffer(number), 1, piece)
      release(string.match(piece, ' (.+)$'), number)
    else
      left = left + sizes[i]
    end
  end
  return left
end

local answer, at = {}, now()
for i = FIRST, #ARGV, FACTS do
  local sequences, tokens, number, sent, left_out, unusable, name_at, row_at = unpack(ARGV, i, i + FACTS - 1)
  local row = redis.call('HINCRBY', COUNTERS, 'rows', 1) - 1
  local name = name_of(row)
  redis.call('RENAME', sent, payload(name))
  redis.call('PERSIST', payload(name))
  redis.call('SETRANGE', payload(name), name_at, name)
  redis.call('SETRANGE', payload(name), row_at, struct.pack('>I4', row))
  for field in string.gmatch(left_out, '[^,]+') do redis.call('HINCRBY', COUNTERS, 'left_out:' .. field, 1) end
  local length = redis.call('STRLEN', payload(name))
  local target, disconnected = unpack(redis.call('HMGET', env(number), 'group_size', 'disconnected'))
  if target and not disconnected then touch(number, at, env_ttl, 0) end
  -- A piece larger than the group size can be part of no sum. A disconnected environment sends no pieces to add.
  if target and not disconnected and tonumber(sequences) < tonumber(target) then
    answer[#answer + 1] = hold(name, number, tonumber(target), sequences, tokens, length, unusable)
  else
    enqueue(name, sequences, tokens, number, length, step, unusable)
    answer[#answer + 1] = -1
  end
end
redis.call('SET', receipt(id), cjson.encode(answer), 'PX', ttl)
return {'OK', answer}
