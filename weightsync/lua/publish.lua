-- Move the pointer to a version whose bytes are readable (rules V3, T4).
-- KEYS: ledger state, weights, audit, wakeups
-- ARGV: incarnation, n, manifest, digest, bytes, seconds, kind, share of elements changed, then pairs: a delta of its chain, the parent of that
local attached = redis.call('HGET', KEYS[1], 'incarnation') or '0'
if tonumber(attached) ~= tonumber(ARGV[1]) then
  return { tonumber(attached) < tonumber(ARGV[1]) and 'REGRESSED' or 'FENCED', attached }
end
local trained = redis.call('HGET', KEYS[1], 'trained') or '0'
if tonumber(ARGV[2]) > tonumber(trained) then
  return { 'UNTRAINED', trained }
end
local version = ARGV[1] .. ':' .. ARGV[2]
local newest = redis.call('HGET', KEYS[2], 'newest')
if newest == version then
  return { redis.call('HGET', KEYS[2], 'digest') == ARGV[4] and 'OK' or 'CONFLICT', newest }
end
if newest and older(version, newest) then
  return { 'BACKWARD', newest }
end
redis.call('HSET', KEYS[2], 'newest', version, 'digest', ARGV[4], 'manifest:' .. version, ARGV[3])
for i = 9, #ARGV, 2 do
  redis.call('HSET', KEYS[2], 'parent:' .. ARGV[i], ARGV[i + 1])
end
redis.call('XADD', KEYS[3], '*', 'op', 'published', 'd', cjson.encode({ version = version, digest = ARGV[4], bytes = tonumber(ARGV[5]),
  seconds = tonumber(ARGV[6]), kind = ARGV[7], changed = tonumber(ARGV[8]) }))
redis.call('PUBLISH', KEYS[4], 'weights')
return { 'OK', version }
