-- requires: groups journal lineage ready release
-- How a chunk gets its groups (rule T3).

-- The staleness guard, from the counts of the header alone. On-policy, a token must be of the line itself.
local function passes(line, record, g, rules)
  if rules.on_policy == 1 then
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
  return total == 0 or (kept > 0 and kept >= rules.min_kept_share * total)
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
  local rules = {}
  rules.on_policy, rules.min_kept_share = nums('on_policy', 'min_kept_share')
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
  local seqs, rows, versions = {}, {}, {}
  for i, one in ipairs(picks) do
    local seq, g = one[1], one[2]
    g.s = 'leased'
    sum_versions(versions, g.v)
    seqs[i], rows[2 * i - 1], rows[2 * i] = seq, seq, cjson.encode(g)
    entry.seqs[#entry.seqs + 1] = tonumber(seq)
  end
  many('ZREM', READY, seqs)
  many('HSET', GROUPS, rows)
  count_versions(versions, -1)
  add('leased', #picks)
  keep_chunk(record.step, chunk, entry)
  return true
end

local function audit_leased(record_step, chunk, entry, incarnation, replay)
  audit('leased', '{"step":' .. record_step .. ',"chunk":' .. chunk .. ',"revision":' .. entry.revision .. ',"seqs":['
    .. table.concat(entry.seqs, ',') .. '],"incarnation":' .. incarnation .. ',"replay":' .. tostring(replay) .. '}')
end
