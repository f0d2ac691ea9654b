-- requires: fill groups journal letters release
-- Rule P2. ARGV: incarnation, step, chunk, seq. A head step is refilled; a step that was trained before keeps a hole.
local incarnation, step, chunk, seq = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local entry, record = chunk_of(step, chunk), step_record(step)
if step ~= num('trained') + 1 or not entry then
  return {'STEP_ORDER', 'payload_lost(' .. step .. ', ' .. chunk .. '): not a leased chunk of step ' .. (num('trained') + 1)}
end
local left = {}
for _, one in ipairs(entry.seqs) do
  if one ~= seq then left[#left + 1] = one end
end
if #left < #entry.seqs then
  local g = group(seq)
  audit('payload_lost', '{"step":' .. step .. ',"chunk":' .. chunk .. ',"seq":' .. seq .. '}')
  if call('HEXISTS', DIGESTS, step) == 1 then
    drop_payload(seq, g)
    call('HDEL', HEADERS, seq)
    add('leased', -1)
    add('bytes', -g.b)
    add('dead:payload_lost', 1)
    bury(seq, cjson.encode({s = 'dead', a = g.a, f = g.f, t = g.t, p = g.p, r = 'payload_lost'}))
    keep_letter(seq, g, 'payload_lost', 'payload lost in a replay of step ' .. step)
    audit('dead', '{"seq":' .. seq .. ',"attempt":' .. g.a .. ',"reason":"payload_lost"}')
    entry.n = entry.n - 1
  else
    release(seq, g, 'payload_lost')
  end
  wake('slot')
  entry.seqs, entry.revision = left, entry.revision + 1
  keep_chunk(step, chunk, entry)
end
if #entry.seqs < entry.n then
  if entry.i ~= incarnation then return {'BLOCKED', 'no group'} end -- open_step and lease judge it anew
  if not fill(entry, record, chunk) then return {'BLOCKED', 'no group'} end
  audit_leased(step, chunk, entry, incarnation, false)
end
return chunk_reply(record, chunk, entry)
