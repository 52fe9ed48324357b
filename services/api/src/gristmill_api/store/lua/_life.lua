-- Which run a stack (one model server and its trainer) works on, and how a deletion begins. A run without a stack ('')
-- never keeps another from opening.

-- Names and deadlines of the living environments of the run whose keys start so, the latest deadline first.
local function alive_with_deadlines(start, at)
  return redis.call('ZREVRANGEBYSCORE', start .. 'envs', '+inf', '(' .. at, 'WITHSCORES', 'LIMIT', 0, 8)
end

-- The run is open or suspended (again): its tombstones stay.
local function index_unfinished(start, id, state)
  if state == 'open' then redis.call('SADD', OPEN_RUNS, id) else redis.call('SREM', OPEN_RUNS, id) end
  redis.call('ZREM', FINISHED_RUNS, id)
  for _, key in ipairs({'trained', 'dropped', 'tombs'}) do redis.call('PERSIST', start .. key) end
end

-- The permits that are out are void. If the run continues, their rows are issued again before any new row.
local function void_permits(start)
  local held = redis.call('HGETALL', start .. 'holders')
  for i = 1, #held, 2 do
    redis.call('ZADD', start .. 'reissue', string.sub(held[i], 2), held[i])
    redis.call('HSET', start .. 'lapsed', held[i], held[i + 1])
  end
  redis.call('DEL', start .. 'permits', start .. 'holders')
end

-- Another run takes the stack. This run loses nothing.
local function suspend(start, id)
  redis.call('HSET', start .. 'record', 'state', 'suspended')
  index_unfinished(start, id, 'suspended')
  void_permits(start)
  redis.call('XADD', start .. 'events', 'MAXLEN', '~', 1024, '*', 'kind', 'suspend')
  redis.call('PUBLISH', EVENTS, 'permits ' .. start)
  redis.call('PUBLISH', EVENTS, 'ready ' .. start)
end

-- Why an environment may not end the work of others on a run: permits are out, perhaps of an environment without a
-- registration. -> nil | {IN_USE, run id, permits, ms until the last expires}
local function used_by_others(start, id, at)
  if not WORD then return nil end
  local out = redis.call('ZCOUNT', start .. 'permits', '(' .. at, '+inf')
  if out == 0 then return nil end
  return {'IN_USE', id, out, redis.call('ZREVRANGE', start .. 'permits', 0, 0, 'WITHSCORES')[2] - at}
end

-- Make the run the open one of its stack, which suspends the one that is. nil, or why not: an environment of the open run
-- is alive. -> {BUSY, open run id, now, environment, deadline, ...} | {IN_USE, open run id, permits, ms}
local function open_on_stack(stack, id, at)
  if stack == '' then return nil end
  local open = redis.call('HGET', STACKS, stack)
  if open and open ~= id then
    local start = 'gm:{' .. open .. '}:'
    local envs = alive_with_deadlines(start, at)
    if #envs > 0 then return {'BUSY', open, at, unpack(envs)} end
    local used = used_by_others(start, open, at)
    if used then return used end
    suspend(start, open)
  end
  redis.call('HSET', STACKS, stack, id)
  return nil
end

-- Whether no trainer has taken the run of /v1 whose keys start so. Such a run has issued no permits and has no groups.
local function is_untaken(start)
  local facts = redis.call('HMGET', start .. 'record', 'protocol', 'trainer')
  return facts[1] == 'gristmill' and not facts[2]
end

-- Whether an untaken run may be deleted for a new one.
local function is_abandoned(start, at)
  return is_untaken(start) and redis.call('ZCARD', start .. 'permits') + redis.call('LLEN', start .. 'fates') == 0
    and #alive_with_deadlines(start, at) == 0
end

-- The run releases its stack, if it has the stack.
local function release_stack(stack, id)
  if redis.call('HGET', STACKS, stack) == id then redis.call('HDEL', STACKS, stack) end
end

-- Returns the trained groups and, if `archive` is '1', the fates of other groups that no process has written to disk yet.
local function waiting_for_disk(archive)
  return redis.call('LLEN', ARCHIVE) + (archive == '1' and redis.call('LLEN', FATES) or 0)
end

-- From here on the run does not exist; delete.lua deletes its keys.
local function begin_deletion()
  local facts = redis.call('HMGET', RECORD, 'run_id', 'stack')
  release_stack(facts[2], facts[1])
  redis.call('RENAME', RECORD, DELETED)
  redis.call('ZREM', RUNS, facts[1])
  redis.call('SREM', OPEN_RUNS, facts[1])
  redis.call('ZREM', FINISHED_RUNS, facts[1])
  redis.call('SADD', DELETING, facts[1])
  publish('ready')
  publish('permits')
end
