-- requires: retention
-- ARGV: limit. Steps whose payloads should leave Redis, ascending.
if call('HEXISTS', STATE, 'identity') == 0 then return {'RUN_MISSING'} end
return {'OK', unpack(to_spill(math.min(tonumber(ARGV[3]), SPILL_LIMIT)))}
