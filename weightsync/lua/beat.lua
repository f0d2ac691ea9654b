-- An engine's heartbeat: registers a new boot, renews a known one, its route and its pins (rule W3).
-- KEYS: engines, facts, routable, pins, audit, wakeups, pauses   ARGV: engine, boot, status, leaving ("1"), ttl ms, pin ttl ms, fleet
local now = now_ms()
local engine, boot = ARGV[1], ARGV[2]
local facts = facts_of(KEYS[2], engine)
local fresh = not facts or facts.boot ~= boot
if fresh then
  local past = {}
  if facts then
    if superseded(facts, boot) then
      return 'SUPERSEDED'
    end
    past = facts.superseded
    past[#past + 1] = facts.boot
    while #past > 16 do
      table.remove(past, 1)
    end
  end
  if facts then
    strike(KEYS[1], KEYS[2], KEYS[3], KEYS[5], engine, facts.boot, 'superseded')
  end
  facts = { boot = boot, state = 'starting', version = '', target = '', reason = '', superseded = past }
  unpin(KEYS[4], engine)
  redis.call('HDEL', KEYS[7], 'held:' .. engine, 'claim:' .. engine)
  audit(KEYS[5], 'engine_started', { engine_id = engine, boot_nonce = boot })
end
local announce = fresh
if ARGV[4] == '1' and facts.state ~= 'leaving' then
  facts.state = 'leaving'
  redis.call('HDEL', KEYS[3], engine)
  announce = true
end
facts.expires = now + ARGV[5]
facts.fleet = ARGV[7]
keep_facts(KEYS[2], engine, facts)
redis.call('HSET', KEYS[1], engine, ARGV[3])
if facts.state == 'routable' and facts.fleet ~= 'eval' then -- slots are promised on engines that fill them
  redis.call('HSET', KEYS[3], engine, facts.version .. ':' .. ms(facts.expires))
end
if facts.version ~= '' then
  pin(KEYS[4], engine .. '/serving', facts.version, now + ARGV[6])
end
if facts.target ~= '' then
  pin(KEYS[4], engine .. '/target', facts.target, now + ARGV[6])
end
if fresh then
  redis.call('PUBLISH', KEYS[6], 'weights') -- its reconciler has work
end
if announce then
  redis.call('PUBLISH', KEYS[6], 'engines')
end
return fresh and 'NEW' or 'RENEWED'
