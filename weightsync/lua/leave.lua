-- An engine leaves in good order. A newer boot of the same id stays.
-- KEYS: engines, facts, routable, pins, audit, wakeups, pauses, reconcilers   ARGV: engine, boot, reason
local facts = facts_of(KEYS[2], ARGV[1])
if not facts or facts.boot ~= ARGV[2] then
  return 0
end
strike(KEYS[1], KEYS[2], KEYS[3], KEYS[5], ARGV[1], ARGV[2], ARGV[3])
unpin(KEYS[4], ARGV[1])
redis.call('HDEL', KEYS[7], 'held:' .. ARGV[1], 'claim:' .. ARGV[1])
redis.call('HDEL', KEYS[8], ARGV[1])
redis.call('PUBLISH', KEYS[6], 'engines')
return 1
