-- KEYS: statuses, deadlines, last seen   ARGV: member id, encoded status, time to live in ms ("0": leave)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[3] == '0' then
  if redis.call('HDEL', KEYS[1], ARGV[1]) == 1 then redis.call('SET', KEYS[3], now) end
  redis.call('ZREM', KEYS[2], ARGV[1])
  return 0
end
redis.call('SET', KEYS[3], now)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
return 1
