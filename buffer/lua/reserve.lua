-- requires: groups lineage slots
-- Rules S1, S3, P3. ARGV: owner, request id, n, max bytes, the version that is served ('': ask the engines), n fresh slot tokens.
local FORGET_LIMIT = 64

local owner, request, n, max_bytes = ARGV[3], ARGV[3] .. '\n' .. ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
if get('run_state') ~= 'open' then return {'RUN_ENDED'} end
local clock, now = tick()
sweep(clock)
local slot_ms, budget, used, head, trained, leased, limit, groups_per_step, on_policy, staleness =
  nums('slot_ms', 'budget', 'bytes', 'incarnation', 'trained', 'leased', 'limit', 'groups_per_step', 'on_policy', 'max_staleness')
for _, old in ipairs(call('ZRANGEBYSCORE', REQUEST_TIMES, '-inf', clock - slot_ms, 'LIMIT', 0, FORGET_LIMIT)) do
  call('HDEL', REQUESTS, old)
  call('ZREM', REQUEST_TIMES, old)
end
local answered = call('HGET', REQUESTS, request)
if answered then return {'OK', answered} end

if max_bytes > budget then return {'BUDGET_TOO_SMALL', budget} end
if head == 0 then return {'BLOCKED', 'no trainer'} end
local outstanding = call('ZCARD', DEADLINES) + call('ZCARD', READY) + leased
n = math.min(n, limit - outstanding)
if n < 1 then return {'BLOCKED', 'no slot'} end
n = math.min(n, math.floor((budget - used) / max_bytes))
if n < 1 then return {'BLOCKED', 'no budget'} end

local line, best, engines, imported = lineage(head), -1, 0, ARGV[7] ~= ''
if imported then best, engines = shared(line, ARGV[7]) or -1, 1 end
for _, entry in ipairs(imported and {} or call('HVALS', ROUTABLE)) do
  local version, expires = string.match(entry, '^(%d+:%d+):(%d+)$')
  if version and tonumber(expires) > now then
    engines = engines + 1
    local served, on_line = shared(line, version)
    if served and on_line then best = math.max(best, served) end
  end
end
if engines == 0 then return {'BLOCKED', 'no engine'} end

local slots, names, rows, deadlines = {}, {}, {}, {}
for i = 1, n do
  local needed = trained
  if on_policy == 0 then needed = math.max(0, trained + math.floor((outstanding + i - 1) / groups_per_step) - staleness) end
  if needed > best then break end
  local seq, g = call('ZPOPMIN', RETRY)[1], nil
  if seq then
    seq = tonumber(seq)
    g = group(seq)
  else
    seq = call('HINCRBY', STATE, 'next_seq', 1) - 1
    g = {a = 0, f = 0}
  end
  g = {s = 'generating', a = g.a + 1, f = g.f, t = ARGV[7 + i], o = owner, p = g.p, m = max_bytes}
  rows[2 * i - 1], rows[2 * i] = seq, cjson.encode(g)
  deadlines[2 * i - 1], deadlines[2 * i] = clock + slot_ms, seq
  slots[i] = {seq, g.a, g.t, head .. ':' .. needed, g.p or cjson.null, max_bytes}
  names[i] = '[' .. seq .. ',' .. g.a .. ']'
end
if #slots == 0 then return {'BLOCKED', 'no version'} end
many('HSET', GROUPS, rows)
many('ZADD', DEADLINES, deadlines)
add('bytes', #slots * max_bytes)
local answer = cjson.encode(slots)
call('HSET', REQUESTS, request, answer)
call('ZADD', REQUEST_TIMES, clock, request)
audit('reserved', '{"owner":' .. text(owner) .. ',"slots":[' .. table.concat(names, ',') .. ']}')
return {'OK', answer}
