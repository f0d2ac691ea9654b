-- A reconciler is still at work on its engine: its lock lasts longer (rule W1). A lock that ran out is taken up again if nobody else has it.
-- KEYS: reconcilers   ARGV: engine, boot, reconciler, lock ms
local mine = ARGV[2] .. '|' .. ARGV[3] .. '|'
if string.sub(redis.call('HGET', KEYS[1], ARGV[1]) or '', 1, #mine) ~= mine then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], mine .. ms(now_ms() + ARGV[4]))
return 1
