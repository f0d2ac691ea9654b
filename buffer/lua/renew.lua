-- requires: groups slots
-- Rule S2. ARGV: seq, token, seq, token, ... Those that are lost.
local clock, reply = tick(), {'OK'}
local deadline = clock + num('slot_ms')
for i = 3, #ARGV, 2 do
  local g = group(ARGV[i])
  if g and g.s == 'generating' and g.t == ARGV[i + 1] then
    call('ZADD', DEADLINES, deadline, ARGV[i])
  else
    reply[#reply + 1] = tonumber(ARGV[i])
  end
end
sweep(clock)
return reply
