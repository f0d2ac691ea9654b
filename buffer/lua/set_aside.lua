-- requires: groups release
-- READY -> DEAD(recorded), or RELEASED(payload_lost). ARGV: incarnation, reason, seq, token, seq, token, ... (and what the fence reads). The number that were READY.
local count = 0
for i = 5, #ARGV - 1, 2 do
  local g = group(ARGV[i])
  if g and g.s == 'ready' and g.t == ARGV[i + 1] then
    release(ARGV[i], g, ARGV[4])
    count = count + 1
  end
end
if count > 0 then wake('slot') end
return {'OK', count}
