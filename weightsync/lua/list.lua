-- Every live engine: id, status, facts. Takes out whoever is overdue; its pins run out by themselves.
-- KEYS: engines, facts, routable, audit, wakeups   ARGV: only routable ones ("1")
local now = now_ms()
local found = {}
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local engine, facts = all[i], cjson.decode(all[i + 1])
  if facts.expires <= now then
    strike(KEYS[1], KEYS[2], KEYS[3], KEYS[4], engine, facts.boot, 'expired')
    redis.call('PUBLISH', KEYS[5], 'engines')
  elseif ARGV[1] ~= '1' or facts.state == 'routable' then
    found[#found + 1] = redis.call('HGET', KEYS[1], engine)
    found[#found + 1] = all[i + 1]
  end
end
return found
