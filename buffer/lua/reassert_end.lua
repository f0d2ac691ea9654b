-- requires: free groups release settle
-- Rule R1, last: bytes over the budget come free, and the trainer's calls are let in again. ARGV: incarnation, its id, what it has seen (as first).
local refused = replaced(tonumber(ARGV[3]), ARGV[4])
if refused then return refused end
local seen = tonumber(ARGV[5])
if seen > 0 and seen <= num('trainer_sequence') then
  call('HSET', STATE, 'trainer_sequence', num('sequence'))
  return {'OK'}
end
local over = num('bytes') - num('budget')
if over > 0 then
  local found = call('ZREVRANGE', READY, 0, -1)
  local slots = call('ZRANGE', DEADLINES, 0, -1)
  table.sort(slots, function(a, b) return tonumber(a) > tonumber(b) end)
  for _, seq in ipairs(slots) do found[#found + 1] = seq end
  for _, seq in ipairs(found) do
    if num('bytes') > num('budget') then release(seq, group(seq), 'rewound') end
  end
end
free()
compact()
call('HSET', STATE, 'trainer_sequence', num('sequence'))
wake('run')
wake('slot')
wake('ready')
return {'OK'}
