#!lua
-- include: _keys.lua
-- Store a group and consume its permit. Not flagged allow-oom: at maxmemory Redis refuses this script, and only this.
-- ARGV: group id, holder, digest (32 raw bytes), sequences, env id, byte cap, payload
-- -> {STORED} | {SAME} | {OTHER} | {MISSING} | {FINISHED} | {DROPPED, reason} | {LOST} | {UNKNOWN} | {SIZE, group size}
--  | {FULL, bytes held}
local id, holder, digest, sequences, env_id, cap, body = unpack(ARGV)

local current = state()
if not current then return {'MISSING'} end
-- First of all: a retry must hear the same answer whatever happened since.
local known = redis.call('HGET', group(id), 'digest') or redis.call('HGET', TRAINED, id)
if known then
  if known == digest then return {'SAME'} end
  return {'OTHER'}
end
if current == 'finished' then return {'FINISHED'} end
local reason = redis.call('HGET', DROPPED, id)
if reason then return {'DROPPED', reason} end
-- A permit in reissue was given back or expired, and nobody holds it: the work done under it is welcome.
local by = redis.call('HGET', HOLDERS, id)
if by and by ~= holder then return {'LOST'} end
if not by and not redis.call('ZSCORE', REISSUE, id) then return {'UNKNOWN'} end
local group_size = redis.call('HGET', RECORD, 'group_size')
if group_size ~= sequences then return {'SIZE', group_size} end
local held = tonumber(redis.call('GET', BYTES) or 0)
if held + #body > tonumber(cap) then return {'FULL', tostring(held)} end

redis.call('ZREM', PERMITS, id)
redis.call('HDEL', HOLDERS, id)
redis.call('ZREM', REISSUE, id)
local seq = redis.call('HINCRBY', COUNTERS, 'seq', 1)
redis.call('SET', payload(id), body)
redis.call('HSET', group(id), 'digest', digest, 'bytes', #body, 'sequences', sequences, 'env_id', env_id,
  'seq', seq, 'attempts', 0)
redis.call('ZADD', READY, seq, id)
redis.call('HINCRBY', COUNTERS, 'accepted', 1)
redis.call('HINCRBY', COUNTERS, 'bytes', #body)
redis.call('INCRBY', BYTES, #body)
tell('ready')
return {'STORED'}
