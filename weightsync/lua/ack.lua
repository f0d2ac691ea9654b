-- An engine serves a version: verified, so routable. Gives the pause back in the same step.
-- KEYS: facts, routable, pins, audit, wakeups, pauses, reconcilers
-- ARGV: engine, boot, reconciler ("": none), version, pin ttl ms, pause_s, apply_s, prepare_s, transport, pause mode
local engine, boot, version = ARGV[1], ARGV[2], ARGV[4]
local facts = facts_of(KEYS[1], engine)
if not facts then
  return 'UNKNOWN'
end
if facts.boot ~= boot then
  return 'SUPERSEDED'
end
if ARGV[3] ~= '' then
  local lock = redis.call('HGET', KEYS[7], engine)
  if not lock then
    return 'UNKNOWN' -- Redis lost it, and no other has it
  end
  if string.sub(lock, 1, #boot + #ARGV[3] + 2) ~= boot .. '|' .. ARGV[3] .. '|' then
    return 'SUPERSEDED'
  end
end
if goes_back(version, facts.version) then
  return 'BACKWARD'
end
redis.call('HDEL', KEYS[6], 'held:' .. engine, 'claim:' .. engine)
local now = now_ms()
local from = facts.version
facts.version, facts.target, facts.reason = version, '', ''
if facts.state ~= 'leaving' then
  facts.state = 'routable'
  if facts.fleet ~= 'eval' then -- slots are promised on engines that fill them
    redis.call('HSET', KEYS[2], engine, version .. ':' .. ms(facts.expires))
  end
end
keep_facts(KEYS[1], engine, facts)
pin(KEYS[3], engine .. '/serving', version, now + ARGV[5])
redis.call('HDEL', KEYS[3], engine .. '/target', applying(engine, version))
audit(KEYS[4], 'applied', { engine_id = engine, boot_nonce = boot, version = version, from = from,
  pause_s = tonumber(ARGV[6]), apply_s = tonumber(ARGV[7]), prepare_s = tonumber(ARGV[8]),
  transport = ARGV[9], pause_mode = ARGV[10] })
redis.call('PUBLISH', KEYS[5], 'engines')
redis.call('PUBLISH', KEYS[5], 'slot')
return 'OK'
