-- requires: free groups journal
-- The step's payloads are in the spill. ARGV: incarnation, step. Steps are spilled in order; asked again, a no-op.
local step, trained = tonumber(ARGV[4]), num('trained')
local done = math.max(num('spilled'), num('dropped'))
if step <= done then return {'OK'} end
if step ~= done + 1 or step > trained then
  return {'STEP_ORDER', 'spilled(' .. step .. '): steps are spilled in order once they are trained; ' .. done .. ' is the newest spilled, ' .. trained .. ' the newest trained'}
end
local bytes = 0
for chunk = 0, chunks_in(step_record(step)) - 1 do
  for _, seq in ipairs(chunk_of(step, chunk).seqs) do
    local g = group(seq)
    drop_payload(seq, g, true)
    bytes = bytes + g.b
    g.b = 0
    keep(seq, g)
  end
end
add('bytes', -bytes)
add('trained_bytes', -bytes)
call('HSET', STATE, 'spilled', step)
audit('spilled', '{"step":' .. step .. ',"bytes":' .. bytes .. '}')
free()
compact()
wake('slot')
return {'OK'}
