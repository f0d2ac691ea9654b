-- Around every call of an attached trainer (rules T1, R1): counts it, and lets in nobody who was replaced or whom the ledger has forgotten. Answers
-- {sequence, reply}. ARGV[3] is the caller's incarnation; ARGV ends with its random id ('': not known to the caller) and the sequence of the last call that
-- was acknowledged to it. Only these calls move `trainer_sequence`, so nobody's later writes hide that one of them was lost.
local seen, id, incarnation = tonumber(table.remove(ARGV)), table.remove(ARGV), tonumber(ARGV[3])
local known = call('HMGET', STATE, 'sequence', 'incarnation', 'incarnation_id', 'trainer_sequence')
local sequence, attached = tonumber(known[1] or '0'), tonumber(known[2] or '-1')
if attached < 0 then return {sequence, {'RUN_MISSING'}} end
if incarnation < attached or (incarnation == attached and id ~= '' and id ~= known[3]) then return {sequence, {'FENCED', attached}} end
if incarnation > attached or seen > tonumber(known[4] or '0') then
  return {sequence, {'REGRESSED', 'incarnation ' .. attached .. ', call ' .. (known[4] or '0') .. '; seen were ' .. incarnation .. ', call ' .. seen}}
end
sequence = sequence + 1
call('HSET', STATE, 'sequence', sequence, 'trainer_sequence', sequence)
return {sequence, body()}
