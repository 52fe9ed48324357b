#!lua flags=allow-oom
-- include: _keys.lua
-- include: _atropos.lua
-- Bring a run that an older version of the API left to today's layout. The run is entered in gm:open or gm:finished. The
-- environments of Atropos' protocol, which had separate keys, move to envs and env:<number>.
-- ARGV: run id, ttl ms of an environment
-- -> {MISSING} | {OK}
local id, ttl, current = ARGV[1], ARGV[2], state()

if not current then return {'MISSING'} end
if current == 'open' then redis.call('SADD', OPEN_RUNS, id) end
if current == 'finished' then redis.call('ZADD', FINISHED_RUNS, 'NX', now(), id) end

local function old(name) return P .. 'atropos:' .. name end
for _, number in ipairs(redis.call('HKEYS', old('envs'))) do
  local facts = cjson.decode(redis.call('HGET', old('envs'), number))
  redis.call('HSET', env(number), 'max_context_len', facts[1], 'weight', facts[2],
    'min_batch_allocation', redis.call('HGET', old('minima'), number) or '',
    'group_size', redis.call('HGET', old('group_sizes'), number))
  local gone = redis.call('SISMEMBER', old('disconnected'), number) == 1
  if gone then redis.call('HSET', env(number), 'disconnected', 1) end
  redis.call('ZADD', ENVS, gone and 0 or redis.call('ZSCORE', old('heard'), number) + ttl, number)
  redis.call('HINCRBY', ATROPOS, 'envs', 1)
end
redis.call('DEL', old('envs'), old('minima'), old('group_sizes'), old('disconnected'), old('heard'))
return {'OK'}
