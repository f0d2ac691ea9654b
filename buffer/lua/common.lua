-- What every script of the ledger shares. KEYS in the order of `RedisLedger`; ARGV[1] wake-up channel, ARGV[2] prefix of payload keys.
-- A script answers {code, ...}; "OK" is success, any other code left everything as it was. Order inside a script (rule L1): validate, free, write.
local call = redis.call
local STATE, FORKS, AUDIT, ROUTABLE = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local GROUPS, HEADERS, READY, RETRY, DEADLINES = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local STEPS, CHUNKS, DIGESTS = KEYS[10], KEYS[11], KEYS[12]
local REQUESTS, REQUEST_TIMES, READY_VERSIONS = KEYS[13], KEYS[14], KEYS[15]
local ENDS, LETTERS, LETTER_SEQS, LETTER_TIMES, READERS, DOOMED_BLOBS = KEYS[16], KEYS[17], KEYS[18], KEYS[19], KEYS[20], KEYS[21]
-- On a cluster payloads lie in other slots, where no script may touch them. There, and only there, two more keys are passed: what `RedisLedger.sweep` is to
-- make permanent, and what it is to delete (rule P1).
local TO_PERSIST, DOOMED = KEYS[22], KEYS[23]
local SWEEP_LIMIT, FREE_LIMIT, COMPACT_LIMIT, LETTER_LIMIT, SPILL_LIMIT = 64, 4096, 16384, 10000, 1000
local UNPACK_LIMIT = 4000 -- Lua takes fewer than 8000 values at once

local function get(name) return call('HGET', STATE, name) end
local function num(name) return tonumber(call('HGET', STATE, name) or '0') end
local function add(name, by) if by ~= 0 then call('HINCRBY', STATE, name, by) end end
local function text(value) return cjson.encode(tostring(value)) end
local function wake(topic) call('PUBLISH', ARGV[1], topic) end
local function audit(op, json) call('XADD', AUDIT, '*', 'op', op, 'd', json) end
local function payload_name(seq, g) return seq .. ':' .. g.a .. ':' .. g.t end
local function whole(number) return string.format('%.0f', number) end
local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- GROUPS: seq -> JSON {s state, a attempt, f counted failures, t slot token, o owner, p prompt id, m bytes charged, b bytes stored,
-- v tokens by version, r reason, x some extras lie in blobs}. b is 0 once the payload is spilled. Once its journal entry is dropped a TRAINED group is "T"
-- until `compact` passes it. Rows below low_seq are of groups that were queued again.
local function group(seq)
  local raw = call('HGET', GROUPS, seq)
  if raw and raw ~= 'T' then return cjson.decode(raw) end
  return nil
end
local function keep(seq, g) call('HSET', GROUPS, seq, cjson.encode(g)) end

-- A group has come to its end: `row` is its last. What was queued again from below low_seq leaves none.
local function bury(seq, row)
  if tonumber(seq) < num('low_seq') then call('HDEL', GROUPS, seq) else call('HSET', GROUPS, seq, row) end
end

-- A payload that nobody needs any more, with the group's blobs unless a recording refers to them. Of what is spilled nothing is left here.
local function drop_payload(seq, g, recorded)
  if g.b == 0 then return end
  local name = payload_name(seq, g)
  if DOOMED then
    call('SREM', TO_PERSIST, name)
    call('SADD', DOOMED, name)
  else
    call('UNLINK', ARGV[2] .. name)
  end
  if g.x and not recorded then call('SADD', DOOMED_BLOBS, name) end
end

local function count_versions(g, sign)
  for version, tokens in pairs(g.v) do
    if call('HINCRBY', READY_VERSIONS, version, sign * tokens) <= 0 then call('HDEL', READY_VERSIONS, version) end
  end
end

-- Rule S4: the ledger clock follows the server's, at most 1 s a call. Returns both, in ms.
local function tick()
  local now, clock, seen = now_ms(), num('clock'), num('seen')
  if seen > 0 then clock = clock + math.max(0, math.min(1000, now - seen)) end
  call('HSET', STATE, 'clock', clock, 'seen', now)
  return clock, now
end

local function drop_letter(seq)
  call('HDEL', LETTERS, seq)
  call('ZREM', LETTER_SEQS, seq)
  call('ZREM', LETTER_TIMES, seq)
end

-- A dead letter; the newest LETTER_LIMIT are kept.
local function keep_letter(seq, g, reason, why)
  call('HSET', LETTERS, seq, cjson.encode({a = g.a, f = g.f, p = g.p, r = reason, w = why, at = now_ms()}))
  call('ZADD', LETTER_SEQS, seq, seq)
  call('ZADD', LETTER_TIMES, call('HINCRBY', STATE, 'letter', 1), seq)
  if call('ZCARD', LETTER_TIMES) > LETTER_LIMIT then drop_letter(call('ZRANGE', LETTER_TIMES, 0, 0)[1]) end
end

-- GENERATING, READY or LEASED -> RELEASED, or DEAD when it is filtered, recorded or has failed too often. `why` in words, `lengths` as JSON, where known.
local function release(seq, g, reason, why, lengths)
  if g.s == 'generating' and get('blobs') == '1' then g.x = 1 end -- its producer may have written them already
  drop_payload(seq, g, reason == 'recorded')
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
  local spent = (reason == 'failed' or reason == 'stale') and g.f >= num('max_attempts')
  local dead = spent or reason == 'filtered' or reason == 'recorded'
  local row = {s = dead and 'dead' or 'released', a = g.a, f = g.f, t = g.t, p = g.p, r = reason}
  if dead then
    bury(seq, cjson.encode(row))
    add('dead:' .. reason, 1)
    if spent then keep_letter(seq, g, reason, why or '') end
  else
    keep(seq, row)
    call('ZADD', RETRY, seq, seq)
    add('releases:' .. reason, 1)
  end
  local known = (why and why ~= '' and ',"why":' .. text(why) or '') .. (lengths and ',"lengths":' .. lengths or '')
  audit(dead and 'dead' or 'released', '{"seq":' .. seq .. ',"attempt":' .. g.a .. ',"reason":"' .. reason .. '"' .. known .. '}')
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

-- What READY groups are ordered by (`Policy.score`), fixed at put: `least` is the oldest version of any token on the line.
local function score(seq, least)
  local selection = get('selection')
  if selection == 'fifo' then return call('HINCRBY', STATE, 'arrivals', 1) end
  if selection == 'freshest' then return whole(seq - 4294967296 * least) end
  return seq
end

-- The staleness guard, from the counts of the header alone. On-policy, a token must be of the line itself. `rules`: on_policy, min_kept_share.
local function passes(line, record, g, rules)
  if rules[1] == '1' then
    for version in pairs(g.v) do
      local _, on_line = shared(line, version)
      if not on_line then return false end
    end
  end
  if record.guard == 'correct' then return true end
  local total, kept = 0, 0
  for version, tokens in pairs(g.v) do
    local n = shared(line, version)
    if n > record.step - 1 then error('a token of ' .. version .. ' is newer than step ' .. record.step) end
    total = total + tokens
    if n >= record.cutoff then kept = kept + tokens end
  end
  if record.guard == 'drop' then return kept == total end
  return total == 0 or (kept > 0 and kept >= tonumber(rules[2]) * total)
end

-- Freshest first, groups with a token over K lie where picks may never come (`Policy.lies_late`): what the guard refuses of them goes back before its turn.
local function refuse_late(line, record, rules)
  if get('selection') ~= 'freshest' then return end
  local refused = false
  for _, seq in ipairs(call('ZRANGEBYSCORE', READY, whole(4294967296 * (1 - record.cutoff)), '+inf')) do
    local g = group(seq)
    if not passes(line, record, g, rules) then
      release(seq, g, 'stale', 'stale in step ' .. record.step)
      refused = true
    end
  end
  if refused then wake('slot') end
end

-- Fills `entry` from READY, in order of selection, releasing what the guard refuses. False, with nothing taken, when there is too little.
local function fill(entry, record, chunk)
  local line, need, at = lineage(), entry.n - #entry.seqs, 0
  local rules = call('HMGET', STATE, 'on_policy', 'min_kept_share')
  refuse_late(line, record, rules)
  local picks, refused = {}, {}
  while #picks < need do
    local candidates = call('ZRANGE', READY, at, at + math.min(need - #picks, UNPACK_LIMIT) - 1)
    if #candidates == 0 then break end
    at = at + #candidates
    local rows = call('HMGET', GROUPS, unpack(candidates))
    for i, seq in ipairs(candidates) do
      local g = cjson.decode(rows[i])
      local into = passes(line, record, g, rules) and picks or refused
      into[#into + 1] = {seq, g}
    end
  end
  for _, one in ipairs(refused) do release(one[1], one[2], 'stale', 'stale in step ' .. record.step) end
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
  for at = 1, #entry.seqs, UNPACK_LIMIT do
    local last = math.min(#entry.seqs, at + UNPACK_LIMIT - 1)
    for _, header in ipairs(call('HMGET', HEADERS, unpack(entry.seqs, at, last))) do reply[#reply + 1] = header end
  end
  return reply
end

-- ENDS: trained step -> "incarnation:milliseconds:bytes": by whom, when, and the bytes of all steps up to it as they were trained.
local function ending(step)
  local raw = call('HGET', ENDS, step)
  if not raw then return nil end
  local incarnation, at, bytes = string.match(raw, '^(%d+):(%d+):(%d+)$')
  return tonumber(at), tonumber(bytes), tonumber(incarnation)
end
local function bytes_up_to(step)
  local _, bytes = ending(step)
  return bytes or num('dropped_bytes')
end
-- It was trained now; so many bytes of payloads are here.
local function end_step(step, incarnation, bytes)
  call('HSET', ENDS, step, incarnation .. ':' .. whole(now_ms()) .. ':' .. whole(bytes_up_to(step - 1) + bytes))
  if bytes > 0 and num('spilled') >= step then call('HSET', STATE, 'spilled', step - 1) end -- what the spill has of it is of a line that was given up
end

-- The newest step that may leave the journal: the oldest kept checkpoint covers it, and it is over a limit of the retention.
local function retired()
  local known = call('HMGET', STATE, 'floor', 'dropped', 'retention', 'retention_bytes', 'retention_ms')
  local floor, dropped = tonumber(known[1] or '0'), tonumber(known[2] or '0')
  local bytes, ms = tonumber(known[4] or '0'), tonumber(known[5] or '0')
  local newest = math.max(dropped, floor - tonumber(known[3] or '0'))
  if newest >= floor or (bytes == 0 and ms == 0) then return newest end
  local total, before, since = bytes_up_to(floor), bytes_up_to(newest), now_ms() - ms
  while newest < floor do
    local at, so_far = ending(newest + 1)
    if at and not (bytes > 0 and total - before > bytes) and not (ms > 0 and at < since) then break end
    newest, before = newest + 1, so_far or before
  end
  return newest
end

-- Steps whose payloads should leave Redis, ascending: they are over the retention, or trained bytes fill over half the budget. They leave in order.
local function to_spill(limit)
  local found, known = {}, call('HMGET', STATE, 'spill', 'spilled', 'dropped', 'trained', 'trained_bytes', 'budget')
  if known[1] ~= '1' then return found end
  local step, trained = math.max(tonumber(known[2] or '0'), tonumber(known[3] or '0')), tonumber(known[4])
  local over, held, half = retired(), tonumber(known[5] or '0'), tonumber(known[6]) / 2
  local before = bytes_up_to(step)
  while #found < limit and step < trained and (step < over or held > half) do
    step = step + 1
    local so_far = bytes_up_to(step)
    found[#found + 1] = step
    held, before = held - (so_far - before), so_far
  end
  return found
end

-- Drops journal entries that no kept checkpoint and no retention needs, with their payloads; a bounded number a call. With a spill, only of steps that it
-- has; the blobs they refer to are the spill's. Returns groups freed.
local function free()
  local target, dropped, freed, low = retired(), num('dropped'), 0, num('low_seq')
  if dropped < target and get('spill') == '1' then target = math.min(target, num('spilled')) end
  while dropped < target and freed < FREE_LIMIT do
    local step = dropped + 1
    local record = step_record(step)
    for chunk = 0, chunks_in(record) - 1 do
      local entry = chunk_of(step, chunk)
      local bytes = 0
      for _, seq in ipairs(entry.seqs) do
        local g = group(seq)
        drop_payload(seq, g)
        call('HDEL', HEADERS, seq)
        if seq < low then call('HDEL', GROUPS, seq) else call('HSET', GROUPS, seq, 'T') end
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
    call('HSET', STATE, 'dropped', step, 'dropped_bytes', whole(bytes_up_to(step)))
    call('HDEL', ENDS, step)
    dropped = step
  end
  return freed
end

-- Rule T7: readers of the journal that are live, {name, step, ...}. READERS: name -> "step:expires in ms". Forgets the others.
local function readers()
  local now, flat, live = now_ms(), call('HGETALL', READERS), {}
  for i = 1, #flat, 2 do
    local step, expires = string.match(flat[i + 1], '^(%d+):(%d+)$')
    if tonumber(expires) > now then
      live[#live + 1], live[#live + 2] = flat[i], step
    else
      call('HDEL', READERS, flat[i])
    end
  end
  return live
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
