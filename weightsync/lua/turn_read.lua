-- KEYS: turn, holders   Answer: turn, number, every holder that is alive
local now = now_ms()
local answer = { redis.call('HGET', KEYS[1], 'turn') or 'generate', redis.call('HGET', KEYS[1], 'number') or '0' }
local held = redis.call('HGETALL', KEYS[2])
for i = 1, #held, 2 do
  if tonumber(string.match(held[i + 1], '|(%d+)$')) > now then
    answer[#answer + 1] = held[i]
  end
end
return answer
