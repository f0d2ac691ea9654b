-- What the engines that evaluate are to serve, from now on.
-- KEYS: aim, weights, wakeups   ARGV: version
if redis.call('HEXISTS', KEYS[2], 'manifest:' .. ARGV[1]) == 0 then
  return 'GONE'
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('PUBLISH', KEYS[3], 'weights')
return 'OK'
