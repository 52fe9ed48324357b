#!lua flags=no-writes
-- include: _keys.lua
-- include: _atropos.lua
-- What the trainer registered, how far it is and how many groups are ready.
-- -> {OK, ready groups, {name, value, ...} or {}}
return {'OK', redis.call('ZCARD', READY), redis.call('HGETALL', ATROPOS)}
