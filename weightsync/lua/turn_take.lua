-- Hold memory of the shared devices: in one's own turn and when no other role holds any, or because one holds it already.
-- A member that boots anew takes the place of its former boot, whose memory went with its process, but not outside of its turn.
-- KEYS: turn, holders   ARGV: role, member, boot, turn of the role, held ms
local now = now_ms()
local me = ARGV[1] .. ':' .. ARGV[2]
local held, others = redis.call('HGETALL', KEYS[2]), false
local mine = false
for i = 1, #held, 2 do
  local boot, expires = string.match(held[i + 1], '^(.*)|(%d+)$')
  if tonumber(expires) <= now then
    redis.call('HDEL', KEYS[2], held[i])
  elseif held[i] == me then
    mine = boot == ARGV[3]
  elseif string.sub(held[i], 1, #ARGV[1] + 1) ~= ARGV[1] .. ':' then
    others = true
  end
end
local turn = redis.call('HGET', KEYS[1], 'turn') or 'generate'
if not mine and (others or turn ~= ARGV[4]) then
  return 0
end
redis.call('HSET', KEYS[2], me, ARGV[3] .. '|' .. ms(now + ARGV[5]))
return 1
