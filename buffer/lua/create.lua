-- ARGV: identity JSON, settings JSON, then names and values of the fields scripts read. 1: created, 0: it is there.
if call('HEXISTS', STATE, 'identity') == 1 then return {'OK', 0} end
call('HSET', STATE, 'identity', ARGV[3], 'settings', ARGV[4], 'run_state', 'open', 'incarnation', 0, 'trained', 0, 'next_seq', 0, 'sequence', 1, unpack(ARGV, 5))
audit('created', '{"identity":' .. ARGV[3] .. ',"settings":' .. ARGV[4] .. '}')
wake('run')
return {'OK', 1}
