-- Rule T1: a new incarnation, and the rewind, at once. ARGV: incarnation id, trainer id, then of the checkpoint: step, incarnation, digest, path; or nothing.
local id, step, from = ARGV[3], tonumber(ARGV[5] or '0'), tonumber(ARGV[6] or '0')
if call('HEXISTS', STATE, 'identity') == 0 then return {'RUN_MISSING'} end
local before = num('incarnation')
local function reply()
  return {'OK', num('incarnation'), num('trained'), call('HGETALL', FORKS)}
end
local latest = call('HGET', FORKS, before)
if latest and string.match(latest, '^%d+:%d+:(.*)$') == id then return reply() end

local kept, known = {}, #ARGV < 5 and num('floor') == 0
for _, one in ipairs(cjson.decode(get('checkpoints') or '[]')) do
  if one[1] == step and one[2] == from then known = true end
  if one[1] <= step then kept[#kept + 1] = one end
end
if not known then return {'NO_CHECKPOINT', get('checkpoints') or '[]'} end

local parent = before
if before > 0 and #ARGV >= 5 then
  local n, on_line = shared(lineage(before), from .. ':' .. step)
  if not (on_line and n == step) then parent = from end
end

local groups, bytes = 0, 0
for s = step + 1, num('trained') do
  for chunk = 0, chunks_in(step_record(s)) - 1 do
    for _, seq in ipairs(chunk_of(s, chunk).seqs) do
      local g = group(seq)
      g.s = 'leased'
      keep(seq, g)
      groups, bytes = groups + 1, bytes + g.b
    end
  end
end
add('trained_groups', -groups)
add('leased', groups)
add('trained_bytes', -bytes)
local incarnation = before + 1
call('HSET', FORKS, incarnation, parent .. ':' .. step .. ':' .. id)
call('HSET', STATE, 'incarnation', incarnation, 'trained', step, 'run_state', 'open', 'trained_by', 0,
  'checkpoints', #kept > 0 and cjson.encode(kept) or '[]')
audit('attached', '{"incarnation":' .. incarnation .. ',"incarnation_id":' .. text(id) .. ',"parent":' .. parent .. ',"fork_step":' .. step
  .. ',"trainer_id":' .. text(ARGV[4]) .. '}')
wake('run')
wake('slot')
wake('ready')
return reply()
