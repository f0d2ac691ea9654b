-- The newest version, read and pinned in one step for a process that is no engine (rule W5).
-- KEYS: weights, pins   ARGV: holder, pin ttl ms, version whose manifest is at hand ("": none)
local newest = redis.call('HGET', KEYS[1], 'newest') or ''
if newest ~= '' then
  pin(KEYS[2], ARGV[1], newest, now_ms() + ARGV[2])
end
if newest == '' or newest == ARGV[3] then
  return { newest, '' }
end
return { newest, redis.call('HGET', KEYS[1], 'manifest:' .. newest) or '' }
