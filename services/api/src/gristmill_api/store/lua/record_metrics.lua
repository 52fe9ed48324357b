#!lua flags=allow-oom
-- include: _keys.lua
-- Take one row of metrics. The same source and step again replaces it. If the rows of all runs are more than their cap,
-- the source with the most bytes, of any run, loses its oldest rows.
-- ARGV: source, step, values (JSON), newest rows to keep, most sources of a run, byte cap of the rows of all runs,
--       bytes of values that the event may hold, '1' if the source belongs to all registered environments
-- -> {MISSING} | {FULL} | {UNREGISTERED}: the caller's word is of no registered environment | {OK}
local source, step, values = unpack(ARGV, 1, 3)
local keep, most_sources, most_bytes, most_in_event, shared = unpack(ARGV, 4, 8)
-- About what Redis needs for a row besides its text.
local ROW = 100

if not state() then return {'MISSING'} end
local refused = shared ~= '1' and foreign(source)
if refused then return refused end
if WORD and shared == '1' then
  local found = false
  for _, id in ipairs(redis.call('ZRANGE', ENVS, 0, -1)) do
    found = found or redis.call('HGET', env(id), 'word') == WORD
  end
  if not found then return {'UNREGISTERED'} end
end
local rows = metrics(source)
if redis.call('SISMEMBER', METRICS, source) == 0 then
  if redis.call('SCARD', METRICS) >= tonumber(most_sources) then return {'FULL'} end
  redis.call('SADD', METRICS, source)
end
local function count(key, bytes)
  redis.call('ZINCRBY', JOURNALS, bytes, key)
  redis.call('INCRBY', JOURNAL, bytes)
end
local replaced = redis.call('ZRANGEBYSCORE', rows, step, step)[1]
if replaced then
  redis.call('ZREM', rows, replaced)
  count(rows, -#replaced - ROW)
end
redis.call('ZADD', rows, step, values)
count(rows, #values + ROW)
local function drop_oldest(key)
  local oldest = redis.call('ZPOPMIN', key)[1]
  if oldest then
    count(key, -#oldest - ROW)
  else
    redis.call('ZREM', JOURNALS, key)
  end
  return oldest
end
while redis.call('ZCARD', rows) > tonumber(keep) do drop_oldest(rows) end
while tonumber(redis.call('GET', JOURNAL)) > tonumber(most_bytes) do
  if not drop_oldest(redis.call('ZREVRANGE', JOURNALS, 0, 0)[1]) then break end
end
if #values > tonumber(most_in_event) then
  emit('metrics', 'source', source, 'step', step)
else
  emit('metrics', 'source', source, 'step', step, 'values', values)
end
return {'OK'}
