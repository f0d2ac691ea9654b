-- Mark dying what nobody needs and forget its manifest; the caller deletes the files, then names them in a later call (rule W5).
-- Needed are the newest few, what is pinned, and whatever these are made from (rule W7).
-- KEYS: weights, pins   ARGV: newest versions to keep, versions whose files are deleted …
for i = 2, #ARGV do
  redis.call('HDEL', KEYS[1], 'dying:' .. ARGV[i])
end
local now = now_ms()
local needed, parents, versions, dying = {}, {}, {}, {}
local function need(version)
  while version and not needed[version] do
    needed[version] = true
    version = parents[version]
  end
end
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  local kind, version = string.match(field, '^(%a+):(.+)$')
  if kind == 'manifest' then
    versions[#versions + 1] = version
  elseif kind == 'dying' then
    dying[#dying + 1] = version
  elseif kind == 'parent' then
    parents[version] = redis.call('HGET', KEYS[1], field)
  end
end
local pins = redis.call('HGETALL', KEYS[2])
for i = 1, #pins, 2 do
  local version, expires = string.match(pins[i + 1], '^(%d+:%d+):(%d+)$')
  if tonumber(expires) > now then
    need(version)
  else
    redis.call('HDEL', KEYS[2], pins[i])
  end
end
table.sort(versions, function(a, b) return older(b, a) end)
for i = 1, math.min(tonumber(ARGV[1]), #versions) do
  need(versions[i])
end
for _, version in ipairs(versions) do
  if not needed[version] then
    redis.call('HDEL', KEYS[1], 'manifest:' .. version)
    redis.call('HSET', KEYS[1], 'dying:' .. version, '1')
    dying[#dying + 1] = version
  end
end
for version, _ in pairs(parents) do
  if not needed[version] then
    redis.call('HDEL', KEYS[1], 'parent:' .. version)
  end
end
return dying
