-- KEYS: weights   ARGV: "fields": names of all fields; "newest": the newest manifest; "newest-version"
if ARGV[1] == 'fields' then
  return redis.call('HKEYS', KEYS[1])
end
local newest = redis.call('HGET', KEYS[1], 'newest')
if ARGV[1] == 'newest-version' then
  return newest
end
return newest and redis.call('HGET', KEYS[1], 'manifest:' .. newest)
