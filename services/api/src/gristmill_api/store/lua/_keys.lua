-- The key layout. Every key of a run starts with KEYS[1], its prefix "gm:{<run id>}:".
--
--   record        HASH    state (open, suspended or finished), digest, env, group_size, stack, protocol, created_ms, creation (random: a run that is
--                         deleted and created again has another); after a take also trainer,
--                         taker (of the last take), incarnation, groups_per_step, training_steps, max_staleness; after a version also
--                         version_incarnation, version_step; went_back (1 after a take at an earlier step than that, until the next version).
--                         env and trainer are JSON as received, never parsed here.
--   counters      HASH    rows (the next row; those before it were issued, or passed over as resting), seq (submits so far), accepted (stored, and neither dead nor
--                         dropped since), trained, bytes (payload bytes held); <state>_sequences and <state>_bytes of
--                         the states ready, leased and dead; expiries (leases that ran out), redeliveries;
--                         lately_accepted, lately_dropped, ahead (_ahead.lua);
--                         rows_below, rows_within, rows_above, passed (_difficulty.lua);
--                         submitted_ms, asked_ms, registered_ms (of the last submit, request for permits to within a second, and registration);
--                         buffered (groups in Atropos' buffers); archive_lost (trained groups let go without being archived, as their disk failed or was full);
--                         left_out:<field> (Atropos' groups stored without an optional field that did not fit)
--
--   versions      HASH    incarnation -> "<first step> <last step>" of the policy versions that its trainer recorded;
--                         lowest (incarnation) and highest (step) of all of them
--
--   A group, once submitted, is in exactly one of ready, leased, dead, trained, dropped:
--   group:<id>    HASH    digest (32 raw bytes), bytes, sequences, env_id, step (of
--                         the oldest weights that sampled it), seq, at (ms), attempts; batch (that leased it last, while
--                         known); reason (why it is dead); unusable (why no trainer of /v1 can use it)
--   payload:<id>  STRING  the group's bytes
--   sent:<...>    STRING  such bytes, until the script that is sent with them takes them; a minute at most
--   ready         ZSET    id -> seq: a group that comes back takes the place it had
--   kinds         HASH    "<sequences> <env_id>" -> how many such groups are ready
--   leased        HASH    id -> batch id
--   dead          ZSET    id -> seq: dead letters, the newest 1024; payload kept
--   trained       HASH    id -> digest: all that is left of an acked group; for audits and late retries of its submit
--   archive       LIST    trained ids whose group and payload stay until they are on the archive's disk
--
--   A batch id that was leased is in at most one of leases, expired, acked:
--   batch:<id>    LIST    its groups in submit order; only while in leases or expired
--   leases        ZSET    batch id -> deadline, ms
--   expired       SET     batch ids past their deadline with every group still in ready and not leased since
--   acked         ZSET    batch id -> ms, the newest 4096, so that a retried ack is known
--
--   A row that was issued is in at most one of permits, reissue, dropped, or it was submitted:
--   permits       ZSET    group id -> deadline, ms
--   holders       HASH    group id -> holder, for the ids in permits
--   reissue       ZSET    group id -> row: returned or expired, to be issued before any new row
--   lapsed        HASH    group id -> holder that had it last, for the ids in reissue
--   dropped       HASH    group id -> reason; also of groups dropped after their submit
--   drops         HASH    reason -> count
--   fates         LIST    JSON of the fates of groups that are not in the archive (dropped, dead, replayed, let go),
--                         until the archiver has written it to drops.jsonl; the newest 65536
--   tombs         LIST    the ids in trained and dropped, oldest first: the newest 65536 stay. Of a finished run all three
--                         expire
--   difficulty    HASH    row -> "<groups> <below|within|above> <mean rewards of its last groups, the newest first>", 131072 rows
--                         at most; only of a run with a curriculum (_difficulty.lua)
--   resting       STRING  bits: number of a row's turn -> 1 if the row rests then
--
--   envs          ZSET    environment id -> deadline, ms, of registered environments; they are alive until then
--   env:<id>      HASH    weight, heartbeat_s ('' for none), registered_ms; word (random, of the process that
--                         registered); _atropos.lua adds fields
--   claims        ZSET    name -> deadline, ms: work that one process is to do, 64 at most
--   claimants     HASH    name -> holder, for the names in claims
--   deleted       HASH    the record of a run that is being deleted; gone when nothing else is left
--   fence         STRING  the last incarnation of a deleted run, for a week: the next run of this id has a higher one, so
--                         a trainer that outlived its run is fenced off
--   latest        LIST    the 8 ids submitted last, newest first
--   example:<id>  STRING  payload of a group in latest that is gone from the store, for a day
--   metrics       SET     sources; metrics:<source> ZSET of JSON -> step, the newest 10000
--   events        STREAM  events of the run, about the newest 1024
--
--   Shared by all runs:
--   gm:runs       ZSET    run id -> created, ms
--   gm:open       SET     ids of the open runs
--   gm:finished   ZSET    run id -> finished, ms, of the finished runs
--   gm:stacks     HASH    stack -> id of its open run
--   gm:deleting   SET     ids of the runs that still have keys to delete
--   gm:bytes      STRING  payload bytes held by all runs
--   gm:journal    STRING  bytes of the metrics rows of all runs
--   gm:journals   ZSET    key of a source's metrics -> their bytes
--   gm:examples   ZSET    key of an example -> ms when its group left the store: the newest 256; an older example is deleted
--   gm:archiver   STRING  random value of the process that archives, while its lease is valid. Only calls with this
--                         value remove groups and fates that wait for the disk
--   gm:events     pub/sub "open" | "ready <prefix>" | "permits <prefix>" | "archive <prefix>" | "events <prefix>":
--                         wakes the clients that wait for the topic, and the readers of the run's event stream

local P = KEYS[1]
local RECORD, COUNTERS = P .. 'record', P .. 'counters'
local READY, LEASED, DEAD, TRAINED, ARCHIVE = P .. 'ready', P .. 'leased', P .. 'dead', P .. 'trained', P .. 'archive'
local READY_BY_SIZE = P .. 'kinds'
local LEASES, EXPIRED, ACKED = P .. 'leases', P .. 'expired', P .. 'acked'
local PERMITS, HOLDERS, REISSUE, LAPSED = P .. 'permits', P .. 'holders', P .. 'reissue', P .. 'lapsed'
local DROPPED, DROPS, TOMBSTONES = P .. 'dropped', P .. 'drops', P .. 'tombs'
local FATES, VERSIONS = P .. 'fates', P .. 'versions'
local DIFFICULTY, RESTING = P .. 'difficulty', P .. 'resting'
local ENVS, LATEST, METRICS, RUN_EVENTS = P .. 'envs', P .. 'latest', P .. 'metrics', P .. 'events'
local CLAIMS, CLAIMANTS = P .. 'claims', P .. 'claimants'
local DELETED, FENCE = P .. 'deleted', P .. 'fence'
local RUNS, STACKS, DELETING, BYTES, EVENTS = 'gm:runs', 'gm:stacks', 'gm:deleting', 'gm:bytes', 'gm:events'
local OPEN_RUNS, FINISHED_RUNS = 'gm:open', 'gm:finished'
local JOURNAL, JOURNALS = 'gm:journal', 'gm:journals'
local EXAMPLES = 'gm:examples'
local ARCHIVER = 'gm:archiver'

local function group(id) return P .. 'group:' .. id end
local function payload(id) return P .. 'payload:' .. id end
local function example(id) return P .. 'example:' .. id end
local function batch(id) return P .. 'batch:' .. id end
local function env(id) return P .. 'env:' .. id end
local function metrics(source) return P .. 'metrics:' .. source end

-- Redis' own clock, ms: the API's processes need not agree on the time.
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function publish(topic) redis.call('PUBLISH', EVENTS, topic .. ' ' .. P) end

-- Append an event to the stream: a kind, then names and values. The next topic that is published wakes its readers.
local function log_event(kind, ...)
  redis.call('XADD', RUN_EVENTS, 'MAXLEN', '~', 1024, '*', 'kind', kind, ...)
end

-- Append an event and wake the stream's readers, if the script publishes no other topic.
local function emit(...)
  log_event(...)
  publish('events')
end

local function delete_example(id)
  redis.call('DEL', example(id))
  redis.call('ZREM', EXAMPLES, example(id))
end

-- The permit of a group is to be issued again.
local function reissue(id)
  redis.call('ZREM', PERMITS, id)
  redis.call('ZADD', REISSUE, string.sub(id, 2), id)
  local holder = redis.call('HGET', HOLDERS, id)
  if holder then
    redis.call('HDEL', HOLDERS, id)
    redis.call('HSET', LAPSED, id, holder)
  end
end

-- Whether the permit of a group is to be issued again, and this holder had it last.
local function lapsed(id, holder)
  return redis.call('ZSCORE', REISSUE, id) and (redis.call('HGET', LAPSED, id) or holder) == holder
end

local function leave_reissue(id)
  redis.call('ZREM', REISSUE, id)
  redis.call('HDEL', LAPSED, id)
end

local function state() return redis.call('HGET', RECORD, 'state') end

-- The answer to a trainer's call that is refused, or nil. '': a caller that has no incarnation and is never fenced off.
local function refusal(incarnation)
  local facts = redis.call('HMGET', RECORD, 'state', 'incarnation')
  if not facts[1] then return {'MISSING'} end
  if incarnation == '' then return nil end
  if facts[1] == 'suspended' then return {'SUSPENDED'} end
  if facts[2] ~= incarnation then return {'FENCED', facts[2]} end
  return nil
end

-- Ids of the registered environments that are alive.
local function alive(at) return redis.call('ZRANGEBYSCORE', ENVS, '(' .. at, '+inf') end

-- Record that a registered environment is alive for `ttl` ms more. Environments ask often and every write is an fsync, so a
-- deadline that is at most `fresh` ms earlier stays.
local function touch(id, at, ttl, fresh)
  if at + ttl - redis.call('ZSCORE', ENVS, id) > fresh then redis.call('ZADD', ENVS, at + ttl, id) end
end

-- Whether a step of the run is finished. Without one, nothing is lost if the run is replaced.
local function started()
  return tonumber(redis.call('HGET', RECORD, 'version_step') or 0) > 0
    or tonumber(redis.call('HGET', COUNTERS, 'trained') or 0) > 0
end

-- The word of the environment that calls; nil if the caller may act for every environment.
local WORD

-- The keys after the first are facts of the call. A call may name the creation of its run: nothing of a run that was deleted
-- reaches the next run of its id, although group ids start again in it. A run that an older version of this API created has
-- no creation to compare.
for i = 2, #KEYS do
  local what, value = string.match(string.sub(KEYS[i], #P + 1), '^(%l+):(.*)$')
  if what == 'word' then WORD = value end
  local own = what == 'creation' and redis.call('HGET', RECORD, 'creation')
  if own and value ~= own then return {'CREATION', own} end
end

-- Whether another process than the caller registered an environment of this name.
local function is_of_another(id)
  local word = WORD and redis.call('HGET', env(id), 'word')
  return word and word ~= WORD
end

-- The answer to a call under a name that another process registered, or nil.
local function foreign(id)
  if not is_of_another(id) then return nil end
  return {'REGISTERED', id, math.max(0, (redis.call('ZSCORE', ENVS, id) or 0) - now())}
end
