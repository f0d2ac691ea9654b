-- An engine decodes again without having acked: it gives its pause to whoever waits.
-- KEYS: reconcilers, pauses, wakeups   ARGV: engine, boot, reconciler
local mine = ARGV[2] .. '|' .. ARGV[3] .. '|'
if string.sub(redis.call('HGET', KEYS[1], ARGV[1]) or '', 1, #mine) ~= mine then
  return 0
end
if redis.call('HDEL', KEYS[2], 'held:' .. ARGV[1]) > 0 then
  for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
    if string.sub(field, 1, 6) == 'claim:' then
      redis.call('PUBLISH', KEYS[3], 'engines')
      break
    end
  end
end
return 1
