-- KEYS: weights, pins   ARGV: "fields": names of all fields; "newest": the newest manifest; "newest-version"; "pinned": versions that a live pin holds
if ARGV[1] == 'fields' then
  return redis.call('HKEYS', KEYS[1])
end
if ARGV[1] == 'pinned' then
  local found, pins = {}, redis.call('HVALS', KEYS[2])
  for i = 1, #pins do
    local version, expires = string.match(pins[i], '^(%d+:%d+):(%d+)$')
    if version and tonumber(expires) > now_ms() then
      found[#found + 1] = version
    end
  end
  return found
end
local newest = redis.call('HGET', KEYS[1], 'newest')
if ARGV[1] == 'newest-version' then
  return newest
end
return newest and redis.call('HGET', KEYS[1], 'manifest:' .. newest)
