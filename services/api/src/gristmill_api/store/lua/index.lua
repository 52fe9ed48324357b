#!lua flags=allow-oom
-- include: _keys.lua
-- Enter a run that an older version of the API left in gm:open or gm:finished.
-- ARGV: run id
-- -> {MISSING} | {OK}
local id, current = ARGV[1], state()

if not current then return {'MISSING'} end
if current == 'open' then redis.call('SADD', OPEN_RUNS, id) end
if current == 'finished' then redis.call('ZADD', FINISHED_RUNS, 'NX', now(), id) end
return {'OK'}
