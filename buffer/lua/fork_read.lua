-- A consistent copy of a run's small state. KEYS: state, audit, headers, groups, then the keys to copy. Answers the fields of the state, the id of the newest
-- audit event, headers, groups, and a dump of each key ('': it is not there).
local call = redis.call
if call('HEXISTS', KEYS[1], 'identity') == 0 then return {} end
local last, about = '0-0', redis.pcall('XINFO', 'STREAM', KEYS[2])
for i = 1, #about, 2 do
  if about[i] == 'last-generated-id' then last = about[i + 1] end
end
local answer = {call('HGETALL', KEYS[1]), last, call('HGETALL', KEYS[3]), call('HGETALL', KEYS[4])}
for i = 5, #KEYS do answer[#answer + 1] = call('DUMP', KEYS[i]) or '' end
return answer
