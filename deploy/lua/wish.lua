-- KEYS: wishes, wake-ups   ARGV: role, how many
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
local number = redis.call('HINCRBY', KEYS[1], 'number', 1)
redis.call('PUBLISH', KEYS[2], 'run')
return number
