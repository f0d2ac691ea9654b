-- Rule P1: GENERATING -> READY if the payload is there. KEYS[16] payload. ARGV: seq, attempt, token, bytes, header, tokens by version (JSON), producer, rewards (JSON).
local payload, seq, attempt, token, bytes = KEYS[16], ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local g = group(seq)
if not g or g.a ~= attempt or g.t ~= token or g.s == 'released' or g.s == 'dead' then
  call('UNLINK', payload)
  return {'SLOT_LOST'}
end
if g.s ~= 'generating' then return {'OK', 'duplicate'} end
if bytes > g.m then
  call('UNLINK', payload)
  return {'TOO_LARGE', g.m}
end
local line, trained, versions, lags = lineage(), num('trained'), cjson.decode(ARGV[8]), {}
for version, tokens in pairs(versions) do
  local n = shared(line, version)
  if not n or n > trained then
    call('UNLINK', payload)
    return {'BAD_VERSION', version}
  end
  lags[trained - n] = (lags[trained - n] or 0) + tokens
end
if call('STRLEN', payload) ~= bytes then return {'PAYLOAD_MISSING'} end
call('PERSIST', payload)
call('ZREM', DEADLINES, seq)
if num('budget') - num('bytes') < g.m then wake('slot') end -- somebody may be waiting for the bytes that come free
add('bytes', bytes - g.m)
g.s, g.b, g.v, g.o, g.m = 'ready', bytes, versions, nil, nil
keep(seq, g)
call('HSET', HEADERS, seq, ARGV[7])
call('ZADD', READY, seq, seq)
count_versions(g, 1)
local lag = {}
for steps, tokens in pairs(lags) do lag[#lag + 1] = '"' .. steps .. '":' .. tokens end
audit('put', '{"seq":' .. seq .. ',"attempt":' .. attempt .. ',"producer_id":' .. text(ARGV[9]) .. ',"bytes":' .. bytes .. ',"tokens":' .. ARGV[8]
  .. ',"trained":' .. trained .. ',"lag":{' .. table.concat(lag, ',') .. '},"rewards":' .. ARGV[10] .. '}')
wake('ready')
return {'OK', 'stored'}
