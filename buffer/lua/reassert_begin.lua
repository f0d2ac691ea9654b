-- requires: groups journal release retention rewind settle
-- Rule R1, first: see `buffer/ledger_rebuild.py`. ARGV: incarnation, its id, incarnations (JSON: number -> [parent, fork step, id]), the newest step that is
-- known by its groups alone, steps (JSON: [step, [groups], incarnation, digest] of those that the journal may hold), checkpoints (JSON). The step it goes on
-- from. Last in ARGV: the sequence of the last call that was acknowledged to the caller (0: not known); a ledger that is not behind it has been told already, and
-- this is a repeat that came late.
local incarnation, id = tonumber(ARGV[3]), ARGV[4]
local refused = replaced(incarnation, id)
if refused then return refused end
local seen = tonumber(ARGV[9])
if incarnation == num('incarnation') and seen > 0 and seen <= num('trainer_sequence') then
  call('HSET', STATE, 'trainer_sequence', num('sequence'))
  return {'OK', num('trained')}
end
call('HSET', STATE, 'sequence', math.max(num('sequence'), seen), 'trainer_sequence', 0) -- until the end, no call of a trainer is let in
local covered, dropped, from = math.max(tonumber(ARGV[6]), num('dropped')), num('dropped'), num('trained')
local taken, digests, all, high = {}, {}, {}, 0
local newest, steps = 0, cjson.decode(ARGV[7])
for _, one in ipairs(steps) do
  local groups = {}
  for _, seq in ipairs(one[2]) do
    groups[seq], all[seq], high = true, true, math.max(high, seq + 1)
  end
  taken[one[1]], digests[one[1]] = groups, one[4]
  newest = math.max(newest, one[1])
  if one[1] <= covered and call('HGET', DIGESTS, one[1]) ~= one[4] then audit_reasserted(one[1], one[3], one[4], one[2]) end
end
newest = #steps > 0 and newest or covered
local follows = newest

for one, fork in pairs(cjson.decode(ARGV[5])) do
  local _, _, known = string.find(call('HGET', FORKS, one) or '', '^%d+:%d+:(.*)$')
  call('HSET', FORKS, one, fork[1] .. ':' .. fork[2] .. ':' .. (fork[3] ~= '' and fork[3] or known or ''))
end
call('HSET', STATE, 'incarnation', incarnation, 'incarnation_id', id, 'trained_by', 0)

-- Takes groups out of a journalled step: `out(seq)` says which, and has made something of them.
local function take_out(step, out)
  for chunk = 0, chunks_in(step_record(step)) - 1 do
    local entry, left = chunk_of(step, chunk), {}
    if entry then
      for _, seq in ipairs(entry.seqs) do
        if not out(seq) then left[#left + 1] = seq end
      end
      entry.seqs = left
      keep_chunk(step, chunk, entry)
    end
  end
end

-- Both sides know the same of a trained step.
local function agrees(step)
  if not taken[step] or call('HGET', DIGESTS, step) ~= digests[step] then return false end
  local left = 0
  for _ in pairs(taken[step]) do left = left + 1 end
  for chunk = 0, chunks_in(step_record(step)) - 1 do
    for _, seq in ipairs(chunk_of(step, chunk).seqs) do
      if not taken[step][seq] then return false end
      left = left - 1
    end
  end
  return left == 0
end
-- The newest covered step that leaves the journal. Later ones stay, for replays and for the spill.
local closed = covered
if from >= covered then
  while closed > dropped and agrees(closed) do closed = closed - 1 end
end
local closed_bytes = bytes_up_to(closed)

-- A step that a checkpoint covers leaves the journal; what the trainer did not take for it is RELEASED.
local function close(step, theirs)
  take_out(step, function(seq)
    if theirs and not theirs[seq] then return false end
    settle(seq)
    return true
  end)
  drop_step(step)
end

-- A step that is to be told again is open, with what both sides know of it.
local function reopen(step, theirs)
  take_out(step, function(seq)
    local g = group(seq)
    untrain(seq, g)
    if theirs[seq] then return false end
    if g.b == 0 then g.x = nil end
    release(seq, g, 'rewound')
    return true
  end)
end

for step = dropped + 1, closed do
  if step_record(step) then close(step, taken[step] and all) end
end
local step = covered + 1
while step_record(step) do
  local mine, fresh = {}, true
  for chunk = 0, chunks_in(step_record(step)) - 1 do
    local entry = chunk_of(step, chunk)
    for _, seq in ipairs(entry and entry.seqs or {}) do
      mine[#mine + 1] = seq
      if all[seq] then fresh = false end
    end
  end
  if taken[step] then
    reopen(step, taken[step])
  elseif step == follows + 1 and fresh then
    follows = step
    for _, seq in ipairs(mine) do untrain(seq, group(seq)) end
  else
    drop_step(step)
  end
  step = step + 1
end

if from > newest or get('on_policy') == '1' then drop_slots() end
for seq = num('next_seq'), high - 1 do
  keep(seq, {s = 'released', a = 0, f = 0, t = ''})
  call('ZADD', RETRY, seq, seq)
end
for _, one in ipairs(steps) do
  if one[1] <= closed then
    for _, seq in ipairs(one[2]) do settle(seq) end
  end
end
local kept = {}
for _, one in ipairs(cjson.decode(ARGV[8])) do
  if one[1] == covered then kept[#kept + 1] = one end
end
call('HSET', STATE, 'next_seq', math.max(num('next_seq'), high), 'trained', covered, 'floor', math.max(num('floor'), covered), 'dropped', closed,
  'dropped_bytes', whole(closed_bytes), 'checkpoints', #kept > 0 and cjson.encode(kept) or '[]')
audit('regressed', '{"incarnation":' .. incarnation .. ',"trained":' .. from .. ',"from":' .. covered .. '}')
return {'OK', covered}
