-- requires: fill journal slots
-- Rule T3. ARGV: incarnation, step, chunk.
local incarnation, step, chunk = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local trained, record = num('trained'), step_record(step)
if step ~= trained + 1 or not record then
  return {'STEP_ORDER', 'lease(' .. step .. ', ' .. chunk .. '): open step ' .. (trained + 1) .. ' first; it is the next'}
end
local count = chunks_in(record)
if chunk < 0 or chunk >= count then return {'STEP_ORDER', 'lease(' .. step .. ', ' .. chunk .. '): a step has chunks 0 to ' .. (count - 1)} end
local entry = chunk_of(step, chunk)
local replay = entry ~= false and entry ~= nil and entry.l ~= incarnation
if not entry then
  if get('run_state') ~= 'open' then return {'RUN_ENDED'} end
  if chunk > 0 and call('HEXISTS', CHUNKS, step .. ':' .. (chunk - 1)) == 0 then
    return {'STEP_ORDER', 'lease(' .. step .. ', ' .. chunk .. '): chunk ' .. (chunk - 1) .. ' comes first'}
  end
  if record.incarnation ~= incarnation then return {'STEP_ORDER', 'lease(' .. step .. ', ' .. chunk .. '): open_step(' .. step .. ') comes first'} end
  entry = {revision = 0, n = math.min(record.chunk, record.groups - record.chunk * chunk), seqs = {}, i = incarnation, l = incarnation}
end
sweep((tick()))
if #entry.seqs < entry.n then
  if entry.i ~= incarnation then -- it lost a payload under another trainer: whoever goes on judges it whole
    if record.incarnation ~= incarnation then return {'STEP_ORDER', 'lease(' .. step .. ', ' .. chunk .. '): open_step(' .. step .. ') comes first'} end
    entry.i, entry.revision = incarnation, entry.revision + 1
  end
  entry.l = incarnation
  if not fill(entry, record, chunk) then return {'BLOCKED', 'no group'} end
  audit_leased(step, chunk, entry, incarnation, false)
elseif replay then
  entry.l = incarnation
  keep_chunk(step, chunk, entry)
  audit_leased(step, chunk, entry, incarnation, true)
end
return chunk_reply(record, chunk, entry)
