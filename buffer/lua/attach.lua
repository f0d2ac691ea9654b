-- requires: groups journal lineage rewind
-- Rule T1: a new incarnation, and the rewind, at once. ARGV: incarnation id, trainer id, the newest incarnation the caller has seen, what to abandon ('':
-- nothing, or the groups of freed steps as JSON), then of the checkpoint: step, incarnation, digest, path; or nothing.
local id, above, abandon = ARGV[3], tonumber(ARGV[5]), ARGV[6] ~= '' and cjson.decode(ARGV[6])
local from_start, step, from = #ARGV < 7, tonumber(ARGV[7] or '0'), tonumber(ARGV[8] or '0')
local before, dropped = num('incarnation'), num('dropped')
local function reply()
  call('HSET', STATE, 'trainer_sequence', num('sequence'))
  return {'OK', num('incarnation'), num('trained'), call('HGETALL', FORKS)}
end
if get('incarnation_id') == id then return reply() end
for _, fork in ipairs(call('HVALS', FORKS)) do -- a repeat of the call that comes after somebody else has attached
  if string.match(fork, '^%d+:%d+:(.*)$') == id then return {'FENCED', before} end
end

local kept, registered = {}, false
for _, one in ipairs(cjson.decode(get('checkpoints') or '[]')) do
  if one[1] == step and one[2] == from then registered = true end
  if one[1] <= step then kept[#kept + 1] = one end
end
local known = registered
if from_start then
  known = num('floor') == 0 or (abandon and #abandon > 0)
elseif abandon and call('HEXISTS', FORKS, from) == 1 and step <= num('trained') then
  known = registered or #abandon > 0 or step >= dropped
end
if not known then return {'NO_CHECKPOINT', get('checkpoints') or '[]'} end

local parent = before
if before > 0 and not from_start then
  local n, on_line = shared(lineage(before), from .. ':' .. step)
  if not (on_line and n == step) then parent = from end
end

local given_up = 0
if abandon then -- rule T5: everything after the checkpoint is given up, also what has left the journal
  drop_steps_after(step)
  for _, seq in ipairs(step < dropped and abandon or {}) do
    local raw = call('HGET', GROUPS, seq)
    if raw == 'T' or (not raw and seq >= 0 and seq < num('low_seq') and call('HEXISTS', LETTERS, seq) == 0) then
      keep(seq, {s = 'released', a = 0, f = 0, t = '', r = 'rewound'})
      call('ZADD', RETRY, seq, seq)
      add('releases:rewound', 1)
      audit('released', '{"seq":' .. seq .. ',"attempt":0,"reason":"rewound"}')
      given_up = given_up + 1
    end
  end
  add('trained_groups', -given_up)
  drop_slots()
  if get('on_policy') == '1' then drop_ready() end
  call('HSET', STATE, 'floor', math.min(num('floor'), step), 'dropped', math.min(dropped, step))
  if not from_start and (#kept == 0 or kept[#kept][1] ~= step) then kept[#kept + 1] = {step, from, ARGV[9], ARGV[10]} end
else
  for s = step + 1, num('trained') do
    for chunk = 0, chunks_in(step_record(s)) - 1 do
      for _, seq in ipairs(chunk_of(s, chunk).seqs) do untrain(seq, group(seq)) end
    end
  end
end
local incarnation = math.max(before, above) + 1
call('HSET', FORKS, incarnation, parent .. ':' .. step .. ':' .. id)
call('HSET', STATE, 'incarnation', incarnation, 'incarnation_id', id, 'trained', step, 'run_state', 'open', 'trained_by', 0,
  'checkpoints', #kept > 0 and cjson.encode(kept) or '[]')
audit('attached', '{"incarnation":' .. incarnation .. ',"incarnation_id":' .. text(id) .. ',"parent":' .. parent .. ',"fork_step":' .. step
  .. ',"trainer_id":' .. text(ARGV[4]) .. '}')
wake('run')
wake('slot')
wake('ready')
return reply()
