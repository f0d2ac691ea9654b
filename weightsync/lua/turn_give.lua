-- Memory of the shared devices is free again. Another boot of the same member keeps what it has.
-- KEYS: holders, wakeups   ARGV: role, member, boot
local me = ARGV[1] .. ':' .. ARGV[2]
local held = redis.call('HGET', KEYS[1], me)
if held and string.sub(held, 1, #ARGV[3] + 1) == ARGV[3] .. '|' then
  redis.call('HDEL', KEYS[1], me)
  redis.call('PUBLISH', KEYS[2], 'run')
end
return 1
