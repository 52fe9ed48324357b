-- The key layout. Every key of a run starts with KEYS[1], its prefix "gm:{<run id>}:".
--
--   record        HASH    state, digest, env, group_size, created_ms; after a take also trainer, incarnation,
--                         groups_per_step, training_steps, max_staleness; after a version also
--                         version_incarnation, version_step. env and trainer are JSON as received, never parsed here.
--   counters      HASH    rows (issued so far, the next row), seq (submits so far), accepted (stored and not dead),
--                         bytes (payload bytes held)
--
--   A group, once submitted, is in exactly one of ready, leased, dead, trained:
--   group:<id>    HASH    digest (32 raw bytes), bytes, sequences, env_id, seq, attempts, batch (that leased it last, while known)
--   payload:<id>  STRING  the group's bytes as received
--   ready         ZSET    id -> seq: a group that comes back takes the place it had
--   leased        HASH    id -> batch id
--   dead          ZSET    id -> seq: delivered max_attempts times and never acked; payload kept
--   trained       HASH    id -> digest: all that is left of an acked group; for audits and late retries of its submit
--
--   A batch id that was leased is in at most one of leases, expired, acked:
--   batch:<id>    LIST    its groups in submit order; only while in leases or expired
--   leases        ZSET    batch id -> deadline, ms
--   expired       SET     batch ids past their deadline of which every group is still in ready, leased by nobody since
--   acked         ZSET    batch id -> ms, the newest 4096, so that a retried ack is known
--
--   A row that was issued is in at most one of permits, reissue, dropped, or it was submitted:
--   permits       ZSET    group id -> deadline, ms
--   holders       HASH    group id -> holder, for the ids in permits
--   reissue       ZSET    group id -> row: given back or expired, to be handed out before any new row
--   dropped       HASH    group id -> reason
--   drops         HASH    reason -> count
--
--   Shared by all runs:
--   gm:runs       ZSET    run id -> created, ms
--   gm:open       STRING  id of the open run
--   gm:bytes      STRING  payload bytes held by all runs
--   gm:events     pub/sub "open" | "ready <prefix>" | "permits <prefix>": something may be there for who waits

local P = KEYS[1]
local RECORD, COUNTERS = P .. 'record', P .. 'counters'
local READY, LEASED, DEAD, TRAINED = P .. 'ready', P .. 'leased', P .. 'dead', P .. 'trained'
local LEASES, EXPIRED, ACKED = P .. 'leases', P .. 'expired', P .. 'acked'
local PERMITS, HOLDERS, REISSUE = P .. 'permits', P .. 'holders', P .. 'reissue'
local DROPPED, DROPS = P .. 'dropped', P .. 'drops'
local RUNS, OPEN, BYTES, EVENTS = 'gm:runs', 'gm:open', 'gm:bytes', 'gm:events'

local function group(id) return P .. 'group:' .. id end
local function payload(id) return P .. 'payload:' .. id end
local function batch(id) return P .. 'batch:' .. id end

-- Redis' own clock, ms: the API's processes need not agree on the time.
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function tell(topic) redis.call('PUBLISH', EVENTS, topic .. ' ' .. P) end

local function state() return redis.call('HGET', RECORD, 'state') end

-- True for everyone but the trainer that took the run last.
local function fenced(incarnation) return redis.call('HGET', RECORD, 'incarnation') ~= incarnation end
