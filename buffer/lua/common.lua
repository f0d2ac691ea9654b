-- What every script of the ledger shares. KEYS in the order of `RedisLedger`; ARGV[1] wake-up channel, ARGV[2] prefix of payload keys.
-- A script answers {code, ...}; "OK" is success, any other code left everything as it was. Order inside a script (rule L1): validate, free, write.
local call = redis.call
local STATE, FORKS, AUDIT, ROUTABLE = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local GROUPS, HEADERS, READY, RETRY, DEADLINES = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local STEPS, CHUNKS, DIGESTS = KEYS[10], KEYS[11], KEYS[12]
local REQUESTS, REQUEST_TIMES, READY_VERSIONS = KEYS[13], KEYS[14], KEYS[15]
local SWEEP_LIMIT, FREE_LIMIT, COMPACT_LIMIT = 64, 4096, 16384

local function get(name) return call('HGET', STATE, name) end
local function num(name) return tonumber(call('HGET', STATE, name) or '0') end
local function add(name, by) if by ~= 0 then call('HINCRBY', STATE, name, by) end end
local function text(value) return cjson.encode(tostring(value)) end
local function wake(topic) call('PUBLISH', ARGV[1], topic) end
local function audit(op, json) call('XADD', AUDIT, '*', 'op', op, 'd', json) end
local function payload_key(seq, g) return ARGV[2] .. seq .. ':' .. g.a .. ':' .. g.t end

-- GROUPS: seq -> JSON {s state, a attempt, f counted failures, t slot token, o owner, p prompt id, m bytes charged, b bytes stored,
-- v tokens by version, r reason}. Once its journal entry is dropped a TRAINED group is "T" until `compact` passes it.
local function group(seq)
  local raw = call('HGET', GROUPS, seq)
  if raw and raw ~= 'T' then return cjson.decode(raw) end
  return nil
end
local function keep(seq, g) call('HSET', GROUPS, seq, cjson.encode(g)) end

local function count_versions(g, sign)
  for version, tokens in pairs(g.v) do
    if call('HINCRBY', READY_VERSIONS, version, sign * tokens) <= 0 then call('HDEL', READY_VERSIONS, version) end
  end
end

-- The incarnation in ARGV must be the attached one (rule T1).
local function fenced(incarnation)
  local attached = num('incarnation')
  if incarnation ~= attached then return {'FENCED', attached} end
  return nil
end

-- Rule S4: the ledger clock follows the server's, at most 1 s a call. Returns both, in ms.
local function tick()
  local time = call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local clock, seen = num('clock'), num('seen')
  if seen > 0 then clock = clock + math.max(0, math.min(1000, now - seen)) end
  call('HSET', STATE, 'clock', clock, 'seen', now)
  return clock, now
end

-- GENERATING, READY or LEASED -> RELEASED, or DEAD when it is filtered or has failed too often.
local function release(seq, g, reason)
  call('UNLINK', payload_key(seq, g))
  call('HDEL', HEADERS, seq)
  local charged = g.b
  if g.s == 'generating' then
    call('ZREM', DEADLINES, seq)
    charged = g.m
  elseif g.s == 'ready' then
    call('ZREM', READY, seq)
    count_versions(g, -1)
  else
    add('leased', -1)
  end
  add('bytes', -charged)
  if reason == 'failed' or reason == 'stale' then g.f = g.f + 1 end
  local dead = reason == 'filtered' or ((reason == 'failed' or reason == 'stale') and g.f >= num('max_attempts'))
  keep(seq, {s = dead and 'dead' or 'released', a = g.a, f = g.f, t = g.t, p = g.p, r = reason})
  if dead then
    add('dead:' .. reason, 1)
  else
    call('ZADD', RETRY, seq, seq)
    add('releases:' .. reason, 1)
  end
  audit(dead and 'dead' or 'released', '{"seq":' .. seq .. ',"attempt":' .. g.a .. ',"reason":"' .. reason .. '"}')
end

-- Slots whose deadline passed come back, a bounded number a call.
local function sweep(clock)
  local expired = call('ZRANGEBYSCORE', DEADLINES, '-inf', clock - 1, 'LIMIT', 0, SWEEP_LIMIT)
  for _, seq in ipairs(expired) do release(seq, group(seq), 'expired') end
  if #expired > 0 then wake('slot') end
end

-- The fork table and, for every incarnation on the attached one's line, the newest n that is shared (rule V2).
local function lineage(head)
  local flat, forks = call('HGETALL', FORKS), {}
  for i = 1, #flat, 2 do
    local parent, step = string.match(flat[i + 1], '^(%d+):(%d+)')
    forks[tonumber(flat[i])] = {parent = tonumber(parent), step = tonumber(step)}
  end
  head = head or num('incarnation')
  local limits, at = {[head] = math.huge}, head
  while forks[at] and forks[at].parent ~= 0 do
    limits[forks[at].parent] = math.min(forks[at].step, limits[at])
    at = forks[at].parent
  end
  return {forks = forks, limits = limits, head = head}
end

-- n' of a version string; nil for an incarnation this run does not have. Second value: the version's own n.
local function shared(line, version)
  local incarnation, n = string.match(version, '^(%d+):(%d+)$')
  incarnation, n = tonumber(incarnation), tonumber(n)
  local own, on_line = n, line.limits[incarnation] ~= nil
  while incarnation and line.limits[incarnation] == nil do
    local fork = line.forks[incarnation]
    if not fork then return nil end
    n = math.min(n, fork.step)
    incarnation = fork.parent
  end
  if not incarnation then return nil end
  n = math.min(n, line.limits[incarnation])
  return n, on_line and n == own
end

-- The record a step's next chunk is judged by; with `incarnation`, the one an earlier chunk was judged by.
local function step_record(step, incarnation)
  local current = incarnation or call('HGET', STEPS, step)
  if not current then return nil end
  local raw = call('HGET', STEPS, step .. ':' .. current)
  return raw and cjson.decode(raw), raw
end
local function chunk_of(step, chunk)
  local raw = call('HGET', CHUNKS, step .. ':' .. chunk)
  return raw and cjson.decode(raw)
end
local function keep_chunk(step, chunk, entry) call('HSET', CHUNKS, step .. ':' .. chunk, cjson.encode(entry)) end
local function chunks_in(record) return math.ceil(record.groups / record.chunk) end

-- The staleness guard, from the counts of the header alone.
local function passes(line, record, g)
  if record.guard == 'correct' then return true end
  local total, kept = 0, 0
  for version, tokens in pairs(g.v) do
    local n = shared(line, version)
    if n > record.step - 1 then error('a token of ' .. version .. ' is newer than step ' .. record.step) end
    total = total + tokens
    if n >= record.cutoff then kept = kept + tokens end
  end
  if record.guard == 'drop' then return kept == total end
  return total == 0 or (kept > 0 and kept >= tonumber(get('min_kept_share')) * total)
end

-- Fills `entry` from READY, oldest first, releasing what the guard refuses. False, with nothing taken, when there is too little.
local function fill(entry, record, chunk)
  local line, need, at = lineage(), entry.n - #entry.seqs, 0
  local picks, refused = {}, {}
  while #picks < need do
    local candidates = call('ZRANGE', READY, at, at + need - #picks - 1)
    if #candidates == 0 then break end
    at = at + #candidates
    for _, seq in ipairs(candidates) do
      local g = group(seq)
      local into = passes(line, record, g) and picks or refused
      into[#into + 1] = {seq, g}
    end
  end
  for _, one in ipairs(refused) do release(one[1], one[2], 'stale') end
  if #refused > 0 then wake('slot') end
  if #picks < need then return false end
  for _, one in ipairs(picks) do
    local seq, g = one[1], one[2]
    call('ZREM', READY, seq)
    count_versions(g, -1)
    g.s = 'leased'
    keep(seq, g)
    entry.seqs[#entry.seqs + 1] = tonumber(seq)
  end
  add('leased', #picks)
  keep_chunk(record.step, chunk, entry)
  return true
end

local function audit_leased(record_step, chunk, entry, incarnation, replay)
  audit('leased', '{"step":' .. record_step .. ',"chunk":' .. chunk .. ',"revision":' .. entry.revision .. ',"seqs":['
    .. table.concat(entry.seqs, ',') .. '],"incarnation":' .. incarnation .. ',"replay":' .. tostring(replay) .. '}')
end

-- {'OK', step, chunk, revision, last, step record, header, ...}
local function chunk_reply(step, chunk, entry)
  local record, raw = step_record(step, entry.i)
  local reply = {'OK', step, chunk, entry.revision, chunk == chunks_in(record) - 1 and 1 or 0, raw}
  if #entry.seqs > 0 then
    for _, header in ipairs(call('HMGET', HEADERS, unpack(entry.seqs))) do reply[#reply + 1] = header end
  end
  return reply
end

-- Drops journal entries that no kept checkpoint and no retention needs, with their payloads; a bounded number a call. Returns groups freed.
local function free()
  local target, dropped, freed = num('floor') - num('retention'), num('dropped'), 0
  while dropped < target and freed < FREE_LIMIT do
    local step = dropped + 1
    local record = step_record(step)
    for chunk = 0, chunks_in(record) - 1 do
      local entry = chunk_of(step, chunk)
      local bytes = 0
      for _, seq in ipairs(entry.seqs) do
        local g = group(seq)
        call('UNLINK', payload_key(seq, g))
        call('HDEL', HEADERS, seq)
        call('HSET', GROUPS, seq, 'T')
        bytes = bytes + g.b
      end
      add('bytes', -bytes)
      add('trained_bytes', -bytes)
      freed = freed + #entry.seqs
      call('HDEL', CHUNKS, step .. ':' .. chunk)
    end
    call('HDEL', STEPS, step)
    for incarnation = record.incarnation, 1, -1 do call('HDEL', STEPS, step .. ':' .. incarnation) end
    call('HDEL', DIGESTS, step)
    dropped = step
    call('HSET', STATE, 'dropped', dropped)
  end
  return freed
end

-- Rule T8: moves low_seq over everything TRAINED and freed, or DEAD.
local function compact()
  local low, high, from = num('low_seq'), num('next_seq'), num('low_seq')
  while low < high and low - from < COMPACT_LIMIT do
    local raw = call('HGET', GROUPS, low)
    if raw ~= 'T' and cjson.decode(raw).s ~= 'dead' then break end
    call('HDEL', GROUPS, low)
    low = low + 1
  end
  if low > from then call('HSET', STATE, 'low_seq', low) end
end
