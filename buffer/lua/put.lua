-- Rule P1: GENERATING -> READY if the payload is there; on a cluster the caller has seen it stored. ARGV, one for each group, in MessagePack: seq, attempt,
-- token, bytes, header, tokens by version (JSON), producer, rewards (JSON), sampled tokens of each rollout (JSON), whether extras lie in blobs.
-- {'OK', answer of each}; an answer is stored or duplicate, with 1 if the caller is to make the payload permanent, or a refusal of that group alone.
local line = lineage()
local known = call('HMGET', STATE, 'trained', 'budget', 'bytes')
local trained, budget, used = tonumber(known[1]), tonumber(known[2]), tonumber(known[3] or '0')
local stored, freed, short = 0, 0, false

local function put(seq, attempt, token, bytes, header, tokens, producer, rewards, lengths, in_blobs)
  local mine = {a = attempt, t = token, x = in_blobs}
  local g = group(seq)
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
  local versions, lags, least = cjson.decode(tokens), {}, nil
  for version, count in pairs(versions) do
    local n = shared(line, version)
    if not n or n > trained then
      drop_payload(seq, mine, true)
      return {'BAD_VERSION', version}
    end
    lags[trained - n] = (lags[trained - n] or 0) + count
    least = math.min(n, least or n)
  end
  if DOOMED then
    call('SADD', TO_PERSIST, payload_name(seq, g))
    call('SREM', DOOMED, payload_name(seq, g)) -- an earlier put of this slot was refused
  else
    local payload = ARGV[2] .. payload_name(seq, g)
    if call('STRLEN', payload) ~= bytes then return {'PAYLOAD_MISSING'} end
    call('PERSIST', payload)
  end
  call('ZREM', DEADLINES, seq)
  short = short or budget - used < g.m
  stored, freed, used = stored + 1, freed + g.m - bytes, used + bytes - g.m
  g.s, g.b, g.v, g.o, g.m, g.x = 'ready', bytes, versions, nil, nil, mine.x and 1 or nil
  keep(seq, g)
  call('HSET', HEADERS, seq, header)
  call('ZADD', READY, score(seq, least or 0), seq)
  count_versions(g, 1)
  local lag = {}
  for steps, count in pairs(lags) do lag[#lag + 1] = '"' .. steps .. '":' .. count end
  audit('put', '{"seq":' .. seq .. ',"attempt":' .. attempt .. ',"producer_id":' .. text(producer) .. ',"bytes":' .. bytes .. ',"tokens":' .. tokens
    .. ',"trained":' .. trained .. ',"lag":{' .. table.concat(lag, ',') .. '},"rewards":' .. rewards .. ',"lengths":' .. lengths .. '}')
  return {'OK', 'stored', 1}
end

local answers = {'OK'}
for at = 3, #ARGV do answers[#answers + 1] = put(unpack(cmsgpack.unpack(ARGV[at]))) end
add('bytes', -freed)
if short then wake('slot') end -- somebody may be waiting for the bytes that come free
if stored > 0 then wake('ready') end
return answers
