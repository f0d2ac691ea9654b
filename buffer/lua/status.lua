-- requires: readers retention slots
-- A consistent picture.
if call('HEXISTS', STATE, 'identity') == 0 then return {'RUN_MISSING'} end
sweep((tick()))
return {'OK', call('HGETALL', STATE), call('ZCARD', DEADLINES), call('ZCARD', READY), call('ZCARD', RETRY), call('HGETALL', FORKS), call('HGETALL', READY_VERSIONS),
  call('HLEN', LETTERS), #to_spill(SPILL_LIMIT), readers()}
