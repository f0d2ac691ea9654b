-- A reconciler stops in good order.
-- KEYS: reconcilers, pauses, wakeups   ARGV: engine, boot, reconciler
local mine = ARGV[2] .. '|' .. ARGV[3] .. '|'
if string.sub(redis.call('HGET', KEYS[1], ARGV[1]) or '', 1, #mine) ~= mine then
  return 0
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], 'held:' .. ARGV[1], 'claim:' .. ARGV[1])
redis.call('PUBLISH', KEYS[3], 'engines')
return 1
