-- KEYS: evaluations, lock   ARGV: phase, final version, lock token, time to live in ms, ms between periodic evaluations
-- Takes or renews the right to evaluate. Answers {"mine", 0}, {"done", 0}, {"early", ms} or {"held", ms}.
local phase, version, token = ARGV[1], ARGV[2], ARGV[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if phase == 'first' and redis.call('HEXISTS', KEYS[1], 'first') == 1 then
  return { 'done', 0 }
end
if phase == 'final' and redis.call('HGET', KEYS[1], 'final') == version then
  return { 'done', 0 }
end
if phase == 'periodic' then
  local due = tonumber(redis.call('HGET', KEYS[1], 'last') or 0) + tonumber(ARGV[5])
  if due > now then
    return { 'early', due - now }
  end
end
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= token then
  return { 'held', math.max(1, redis.call('PTTL', KEYS[2])) }
end
redis.call('SET', KEYS[2], token, 'PX', ARGV[4])
return { 'mine', 0 }
