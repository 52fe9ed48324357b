#!lua flags=allow-oom
-- include: _keys.lua
-- Take one row of metrics. The same source and step again replaces it.
-- ARGV: source, step, values (JSON), newest rows to keep
-- -> {MISSING} | {OK}
local source, step, values, keep = unpack(ARGV)

if not state() then return {'MISSING'} end
redis.call('SADD', METRICS, source)
redis.call('ZREMRANGEBYSCORE', metrics(source), step, step)
redis.call('ZADD', metrics(source), step, values)
redis.call('ZREMRANGEBYRANK', metrics(source), 0, -keep - 1)
emit('metrics', 'source', source, 'step', step, 'values', values)
return {'OK'}
