-- A version that a process reads stays, under a pin of its own: a look at the pointer, however late it arrives, does not move it (rule W5).
-- KEYS: weights, pins   ARGV: holder, pin ttl ms, version
if redis.call('HEXISTS', KEYS[1], 'manifest:' .. ARGV[3]) == 0 then
  return 'GONE'
end
pin(KEYS[2], ARGV[1] .. '/' .. ARGV[3], ARGV[3], now_ms() + ARGV[2])
return 'OK'
