-- Take an engine off the routes until it acks again. A boot that is not the registered one changes nothing.
-- KEYS: facts, routable, audit, wakeups   ARGV: engine, boot, reason
local facts = facts_of(KEYS[1], ARGV[1])
if not facts or facts.boot ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[2], ARGV[1])
if facts.state == 'leaving' or (facts.state == 'unfit' and facts.reason == ARGV[3]) then
  return 0
end
facts.state = 'unfit'
facts.reason = ARGV[3]
keep_facts(KEYS[1], ARGV[1], facts)
audit(KEYS[3], 'unfit', { engine_id = ARGV[1], boot_nonce = ARGV[2], reason = ARGV[3] })
redis.call('PUBLISH', KEYS[4], 'engines')
redis.call('PUBLISH', KEYS[4], 'weights') -- its reconciler has work
return 1
