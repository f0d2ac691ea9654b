-- Read the pointer and hold what it names against garbage collection, in one step (rule W5). TTL "0": let go.
-- KEYS: weights, pins   ARGV: holder, time to live in ms
if ARGV[2] == '0' then
  redis.call('HDEL', KEYS[2], ARGV[1])
  return false
end
local newest = redis.call('HGET', KEYS[1], 'newest')
if not newest then
  return false
end
pin(KEYS[2], ARGV[1], newest, now_ms() + ARGV[2])
return redis.call('HGET', KEYS[1], 'manifest:' .. newest)
