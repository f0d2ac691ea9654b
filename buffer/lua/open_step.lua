-- requires: journal lineage
-- Rule T2. ARGV: incarnation, step. The step's record as JSON.
local incarnation, step = tonumber(ARGV[3]), tonumber(ARGV[4])
local trained = num('trained')
if step ~= trained + 1 then return {'STEP_ORDER', 'open_step(' .. step .. '): step ' .. trained .. ' is the newest trained, so ' .. (trained + 1) .. ' is next'} end

local record, raw = step_record(step)
local opened_by = call('HGET', STEPS, step)
if record then
  -- Another trainer opened it. A step that is whole, or was trained before, is replayed by its record; the rest of a torn one is judged anew.
  local journalled, whole = 0, true
  for chunk = 0, chunks_in(record) - 1 do
    local entry = chunk_of(step, chunk)
    if entry then journalled = journalled + 1 end
    if not entry or #entry.seqs < entry.n then whole = false end
  end
  if tonumber(opened_by) == incarnation or whole then return {'OK', raw} end
  if journalled == 0 then call('HDEL', STEPS, step .. ':' .. opened_by) end
end
local line = lineage()
local forks = {}
for one, fork in pairs(line.forks) do forks[#forks + 1] = '"' .. one .. '":[' .. fork.parent .. ',' .. fork.step .. ']' end
local reach = get('on_policy') == '1' and 0 or num('max_staleness')
local cutoff = step - 1 - reach
raw = '{"step":' .. step .. ',"incarnation":' .. incarnation .. ',"groups":' .. num('groups_per_step') .. ',"chunk":' .. num('chunk')
  .. ',"guard":"' .. get('guard') .. '","cutoff":' .. cutoff .. ',"head":' .. incarnation .. ',"forks":{' .. table.concat(forks, ',') .. '}}'
call('HSET', STEPS, step, incarnation, step .. ':' .. incarnation, raw)
audit('opened', '{"step":' .. step .. ',"incarnation":' .. incarnation .. ',"cutoff":' .. cutoff .. '}')
return {'OK', raw}
