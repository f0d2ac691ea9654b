-- Mark dying what nobody needs and forget its manifest; the caller deletes the files, then names them in a later call (rule W5).
-- KEYS: weights, pins   ARGV: newest versions to keep, versions whose files are deleted …
for i = 2, #ARGV do
  redis.call('HDEL', KEYS[1], 'dying:' .. ARGV[i])
end
local now = now_ms()
local pinned = {}
local pins = redis.call('HGETALL', KEYS[2])
for i = 1, #pins, 2 do
  local version, expires = string.match(pins[i + 1], '^(%d+:%d+):(%d+)$')
  if tonumber(expires) > now then
    pinned[version] = true
  else
    redis.call('HDEL', KEYS[2], pins[i])
  end
end
local versions, dying = {}, {}
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  local version = string.match(field, '^manifest:(.+)$')
  if version then
    versions[#versions + 1] = version
  end
  version = string.match(field, '^dying:(.+)$')
  if version then
    dying[#dying + 1] = version
  end
end
table.sort(versions, function(a, b) return older(b, a) end)
for i = tonumber(ARGV[1]) + 1, #versions do
  if not pinned[versions[i]] then
    redis.call('HDEL', KEYS[1], 'manifest:' .. versions[i])
    redis.call('HSET', KEYS[1], 'dying:' .. versions[i], '1')
    dying[#dying + 1] = versions[i]
  end
end
return dying
