-- Around every script that changes the ledger (rule R1): counts the call. Answers {sequence, reply}.
local sequence = call('HINCRBY', STATE, 'sequence', 1)
if sequence == 1 and call('HEXISTS', STATE, 'identity') == 0 then
  call('DEL', STATE)
  return {0, {'RUN_MISSING'}}
end
return {sequence, body()}
