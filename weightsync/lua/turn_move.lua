-- The turn goes on. Only the attached trainer moves it; the same turn again changes nothing.
-- KEYS: ledger state, turn, audit, wakeups   ARGV: incarnation, turn
local attached = redis.call('HGET', KEYS[1], 'incarnation') or '0'
if tonumber(attached) ~= tonumber(ARGV[1]) then
  return { tonumber(attached) < tonumber(ARGV[1]) and 'REGRESSED' or 'FENCED', attached }
end
if (redis.call('HGET', KEYS[2], 'turn') or 'generate') == ARGV[2] then
  return { 'OK', attached }
end
local number = redis.call('HINCRBY', KEYS[2], 'number', 1)
redis.call('HSET', KEYS[2], 'turn', ARGV[2])
audit(KEYS[3], 'turn', { turn = ARGV[2], number = number })
redis.call('PUBLISH', KEYS[4], 'run')
return { 'OK', attached }
