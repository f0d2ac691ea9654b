-- Rule T8. ARGV: incarnation, reason.
if get('run_state') == 'draining' then return {'OK'} end
call('HSET', STATE, 'run_state', 'draining')
audit('drained', '{"reason":' .. text(ARGV[4]) .. '}')
wake('run')
wake('slot')
wake('ready')
return {'OK'}
