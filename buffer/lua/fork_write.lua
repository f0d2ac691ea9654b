-- A run as a copy of another, all at once. KEYS: state, audit, headers, deadlines, then the keys in the order of `fork_read`. ARGV: the only checkpoint as JSON,
-- id and fields of the first audit event, a dump of each key, then sequence numbers and headers that replace what was dumped. 1: it is there; 0: one was.
local call = redis.call
if call('HGET', KEYS[1], 'forked') == ARGV[3] then return 1 end
if call('EXISTS', KEYS[1]) == 1 then return 0 end
for i = 5, #KEYS do
  local dump = ARGV[i - 1]
  if dump == '' then call('DEL', KEYS[i]) else call('RESTORE', KEYS[i], 0, dump, 'REPLACE') end
end
call('HSET', KEYS[1], 'checkpoints', ARGV[1], 'forked', ARGV[3])
for i = #KEYS, #ARGV, 2 do call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
-- Nobody here holds the slots: they expire at the next look.
for _, seq in ipairs(call('ZRANGE', KEYS[4], 0, -1)) do call('ZADD', KEYS[4], 0, seq) end
call('DEL', KEYS[2])
call('XADD', KEYS[2], ARGV[2], 'op', 'forked', 'd', ARGV[3])
return 1
