-- An engine leaves in good order. A newer boot of the same id stays.
-- KEYS: engines, facts, routable, pins, audit, wakeups, pauses, reconcilers   ARGV: engine, boot, reason
local facts = facts_of(KEYS[2], ARGV[1])
if not facts or facts.boot ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1] .. '/serving', ARGV[1] .. '/target')
redis.call('HDEL', KEYS[7], 'held:' .. ARGV[1], 'claim:' .. ARGV[1])
redis.call('HDEL', KEYS[8], ARGV[1])
audit(KEYS[5], 'engine_left', { engine_id = ARGV[1], boot_nonce = ARGV[2], reason = ARGV[3] })
redis.call('PUBLISH', KEYS[6], 'engines')
return 1
