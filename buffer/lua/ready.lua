-- ARGV: count. Headers of the READY groups that would be selected next.
if call('HEXISTS', STATE, 'identity') == 0 then return {'RUN_MISSING'} end
local reply = {'OK'}
for _, seq in ipairs(call('ZRANGE', READY, 0, ARGV[3] - 1)) do reply[#reply + 1] = call('HGET', HEADERS, seq) end
return reply
