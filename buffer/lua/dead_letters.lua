-- ARGV: after, count. Dead letters with a greater seq, ascending: {seq, JSON, ...}
if call('HEXISTS', STATE, 'identity') == 0 then return {'RUN_MISSING'} end
local reply = {'OK'}
for _, seq in ipairs(call('ZRANGEBYSCORE', LETTER_SEQS, '(' .. ARGV[3], '+inf', 'LIMIT', 0, ARGV[4])) do
  reply[#reply + 1], reply[#reply + 2] = tonumber(seq), call('HGET', LETTERS, seq)
end
return reply
