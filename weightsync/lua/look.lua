-- What a reconciler must know before it decides, while it renews its lock and pins what it may take (rules W1, W5).
-- The fleet that evaluates goes for what it is asked for, as long as that is kept, and for nothing else.
-- KEYS: facts, weights, pins, reconcilers, aim of the evaluation   ARGV: engine, boot, reconciler, lock ms, pin ttl ms, version whose manifest is at hand ("": none),
--   "1": deltas cannot be had there, so what the newest is made from, whole
local now = now_ms()
local engine, boot, owner = ARGV[1], ARGV[2], ARGV[3]
local facts = facts_of(KEYS[1], engine)
if facts and superseded(facts, boot) then
  return { 'SUPERSEDED' }
end
local lock_boot, lock_owner, expires = string.match(redis.call('HGET', KEYS[4], engine) or '', '^(.*)|(.*)|(%d+)$')
if lock_boot == boot and lock_owner ~= owner and tonumber(expires) > now then
  return { 'LOCKED', ms(expires - now) }
end
redis.call('HSET', KEYS[4], engine, boot .. '|' .. owner .. '|' .. ms(now + ARGV[4]))
if not facts or facts.boot ~= boot then
  return { 'UNKNOWN' }
end
local newest = redis.call('HGET', KEYS[2], 'newest') or ''
if facts.fleet == 'eval' then
  newest = redis.call('GET', KEYS[5]) or ''
  if redis.call('HEXISTS', KEYS[2], 'manifest:' .. newest) == 0 then
    newest = ''
  end
end
local published = newest
if ARGV[7] == '1' then
  local base = newest
  while base and redis.call('HEXISTS', KEYS[2], 'parent:' .. base) == 1 do
    base = redis.call('HGET', KEYS[2], 'parent:' .. base)
  end
  if redis.call('HEXISTS', KEYS[2], 'manifest:' .. base) == 1 and not goes_back(base, facts.version) then
    newest = base
  end
end
local manifest = ''
if newest ~= '' and facts.state ~= 'leaving' and (facts.version ~= newest or facts.state ~= 'routable') then
  pin(KEYS[3], engine .. '/target', newest, now + ARGV[5])
  if facts.target ~= newest then
    facts.target = newest
    keep_facts(KEYS[1], engine, facts)
  end
  if newest ~= ARGV[6] then
    manifest = redis.call('HGET', KEYS[2], 'manifest:' .. newest) or ''
  end
end
return { 'OK', facts.state, newest, facts.version, published, manifest }
