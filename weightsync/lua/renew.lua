-- A reconciler is still at work on its engine: its lock lasts longer (rule W1). A lock that ran out, or that Redis lost, is taken up again if nobody
-- else has it.
-- KEYS: reconcilers   ARGV: engine, boot, reconciler, lock ms
local mine = ARGV[2] .. '|' .. ARGV[3] .. '|'
local lock = redis.call('HGET', KEYS[1], ARGV[1]) or mine
if string.sub(lock, 1, #mine) ~= mine then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], mine .. ms(now_ms() + ARGV[4]))
return 1
