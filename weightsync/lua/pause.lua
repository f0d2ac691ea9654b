-- May this engine pause now? Lengthens the reconciler's lock over the whole update in the same step (rules W1, W8).
-- A claim waits in line: oldest version first, then the engine id. An idle engine pauses nobody: it is let through and not counted.
-- KEYS: facts, reconcilers, pauses   ARGV: engine, boot, reconciler, most paused, validity ms, claim ms, idle ("1")
local now = now_ms()
local engine, boot, owner = ARGV[1], ARGV[2], ARGV[3]
local mine = boot .. '|' .. owner .. '|'
if string.sub(redis.call('HGET', KEYS[2], engine) or '', 1, #mine) ~= mine then
  return { 'SUPERSEDED' }
end
local facts = facts_of(KEYS[1], engine)
if not facts then
  return { 'UNKNOWN' }
end
if ARGV[7] ~= '1' then
  local held, ahead = 0, 0
  local all = redis.call('HGETALL', KEYS[3])
  for i = 1, #all, 2 do
    local kind, other = string.match(all[i], '^(%a+):(.*)$')
    if kind and other ~= engine then
      local theirs = facts_of(KEYS[1], other)
      local alive = theirs and theirs.expires > now
      if not alive or tonumber(all[i + 1]) <= now then
        redis.call('HDEL', KEYS[3], all[i])
      elseif kind == 'held' then
        held = held + 1
      elseif older(theirs.version, facts.version) or (theirs.version == facts.version and other < engine) then
        ahead = ahead + 1
      end
    end
  end
  if held + ahead >= tonumber(ARGV[4]) then
    redis.call('HSET', KEYS[3], 'claim:' .. engine, ms(now + ARGV[6]))
    return { 'WAIT' }
  end
  redis.call('HSET', KEYS[3], 'held:' .. engine, ms(now + ARGV[5]))
end
redis.call('HDEL', KEYS[3], 'claim:' .. engine)
redis.call('HSET', KEYS[2], engine, mine .. ms(now + ARGV[5]))
return { 'OK' }
