-- requires: groups lineage ready
-- Rule P1: GENERATING -> READY if the payload is there; on a cluster the caller has seen it stored. ARGV, one for each group, in MessagePack: seq, attempt,
-- token, bytes, header, tokens by version, the audit event but what only the ledger knows (JSON without its closing brace), whether extras lie in blobs.
-- {'OK', answer of each}; an answer is stored or duplicate, with 1 if the caller is to make the payload permanent, or a refusal of that group alone.
local trained, budget, used, arrivals, head = nums('trained', 'budget', 'bytes', 'arrivals', 'incarnation')
local line, selection = lineage(head), get('selection')
local stored, short, groups = {}, false, {}

-- What READY groups are ordered by (`Policy.score`), fixed at put: `least` is the oldest version of any token on the line.
local function score(seq, least)
  if selection == 'fifo' then
    arrivals = arrivals + 1
    return arrivals
  end
  if selection == 'freshest' then return whole(seq - 4294967296 * least) end
  return seq
end

local function put(seq, attempt, token, bytes, header, versions, event, in_blobs)
  local mine, g = {a = attempt, t = token, x = in_blobs}, groups[seq]
  if not g or g.a ~= attempt or g.t ~= token or g.s == 'released' or g.s == 'dead' then
    drop_payload(seq, mine, not g or g.r == 'recorded') -- a recording may have the blobs of what is recorded, or gone for long
    return {'SLOT_LOST'}
  end
  if g.s ~= 'generating' then
    if g.b == 0 then drop_payload(seq, mine, true) elseif DOOMED then call('SADD', TO_PERSIST, payload_name(seq, g)) end
    return {'OK', 'duplicate', g.b > 0 and 1 or 0}
  end
  if bytes > g.m then
    drop_payload(seq, mine, true)
    return {'TOO_LARGE', g.m}
  end
  local lags, least = {}, nil
  for version, count in pairs(versions) do
    local n = shared(line, version)
    if not n or n > trained then
      drop_payload(seq, mine, true)
      return {'BAD_VERSION', version}
    end
    lags[trained - n] = (lags[trained - n] or 0) + count
    least = math.min(n, least or n)
  end
  local name = payload_name(seq, g)
  if DOOMED then
    call('SADD', TO_PERSIST, name)
    call('SREM', DOOMED, name) -- an earlier put of this slot was refused
  else
    if call('STRLEN', ARGV[2] .. name) ~= bytes then return {'PAYLOAD_MISSING'} end
    call('PERSIST', ARGV[2] .. name)
  end
  short = short or budget - used < g.m
  used = used + bytes - g.m
  g.s, g.b, g.v, g.o, g.m, g.x = 'ready', bytes, versions, nil, nil, mine.x and 1 or nil
  stored[#stored + 1] = {seq = seq, g = g, header = header, score = score(seq, least or 0), event = event, lags = lags}
  return {'OK', 'stored', 1}
end

-- What was stored, written for all of them at once.
local function write()
  local seqs, rows, headers, scores, versions = {}, {}, {}, {}, {}
  for i, one in ipairs(stored) do
    local key, value = 2 * i - 1, 2 * i
    seqs[i] = one.seq
    rows[key], rows[value] = one.seq, cjson.encode(one.g)
    headers[key], headers[value] = one.seq, one.header
    scores[key], scores[value] = one.score, one.seq
    sum_versions(versions, one.g.v)
    local lag = {}
    for steps, count in pairs(one.lags) do lag[#lag + 1] = '"' .. steps .. '":' .. count end
    audit('put', one.event .. ',"trained":' .. trained .. ',"lag":{' .. table.concat(lag, ',') .. '}}')
  end
  many('ZREM', DEADLINES, seqs)
  many('HSET', GROUPS, rows)
  many('HSET', HEADERS, headers)
  many('ZADD', READY, scores)
  count_versions(versions, 1)
  call('HSET', STATE, 'bytes', used, 'arrivals', arrivals)
end

local puts, seqs = {}, {}
for at = 3, #ARGV do
  puts[at - 2] = cmsgpack.unpack(ARGV[at])
  seqs[at - 2] = puts[at - 2][1]
end
for i, raw in ipairs(call('HMGET', GROUPS, unpack(seqs))) do
  if raw and raw ~= 'T' then groups[seqs[i]] = groups[seqs[i]] or cjson.decode(raw) end
end
local answers = {'OK'}
for i, one in ipairs(puts) do answers[i + 1] = put(unpack(one)) end
if #stored > 0 then
  write()
  if short then wake('slot') end -- somebody may be waiting for the bytes that come free
  wake('ready')
end
return answers
