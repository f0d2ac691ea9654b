-- requires: groups letters ready

-- A group has come to its end: `row` is its last. What was queued again from below low_seq leaves none.
local function bury(seq, row)
  if tonumber(seq) < num('low_seq') then call('HDEL', GROUPS, seq) else call('HSET', GROUPS, seq, row) end
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
    count_versions(g.v, -1)
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
