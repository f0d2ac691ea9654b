-- requires: readers
-- Rule T7. ARGV: reader, step, ms. The newest trained step.
if call('HEXISTS', STATE, 'identity') == 0 then return {'RUN_MISSING'} end
local step, dropped = tonumber(ARGV[4]), num('dropped')
if step <= dropped then
  call('HDEL', READERS, ARGV[3])
  return {'REPLAY_GAP', 'step ' .. step .. ' has left the journal, which starts at step ' .. (dropped + 1)}
end
call('HSET', READERS, ARGV[3], step .. ':' .. whole(now_ms() + ARGV[5]))
readers()
return {'OK', num('trained')}
