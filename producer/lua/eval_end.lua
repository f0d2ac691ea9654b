-- KEYS: evaluations, lock, audit, wake-ups   ARGV: phase ("": give the lock back only), final version, lock token, audit operation, audit fields as JSON …
-- Records an evaluation and gives the lock back, if the lock is still the caller's; answers 1 if it was.
if redis.call('GET', KEYS[2]) ~= ARGV[3] then
  return 0
end
redis.call('DEL', KEYS[2])
if ARGV[1] ~= '' then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'last', time[1] * 1000 + math.floor(time[2] / 1000))
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  for i = 5, #ARGV do
    redis.call('XADD', KEYS[3], '*', 'op', ARGV[4], 'd', ARGV[i])
  end
end
redis.call('PUBLISH', KEYS[4], 'run')
return 1
