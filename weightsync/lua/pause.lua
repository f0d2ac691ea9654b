-- May this engine pause now? Lengthens the reconciler's lock over the whole update in the same step (rules W1, W8).
-- A claim waits in line: oldest version first, then the engine id.
-- An engine that is off the routes and idle pauses nobody: it is let through and not counted. On the routes an idle one may be asked at any moment, so it waits
-- in line as well; none comes onto them meanwhile but by its ack, which ends its pause.
-- Nor does one of the fleet that evaluates pause anybody: it takes a version between two evaluations.
-- An engine that decodes is paused only while the given share of those that do is left; with none paused, one always may be, or a small run would stand still.
-- The version is pinned by its own name, since a look that comes late, or again, moves the pin on what is to be taken next to a newer one (rule W5).
-- KEYS: facts, reconcilers, pauses, weights, pins
-- ARGV: engine, boot, reconciler, most paused, validity ms, claim ms, idle ("1"), share that goes on serving, version to be applied, pin ttl ms
local now = now_ms()
local engine, boot, owner = ARGV[1], ARGV[2], ARGV[3]
local mine = boot .. '|' .. owner .. '|'
local lock = redis.call('HGET', KEYS[2], engine)
if not lock then
  return { 'UNLOCKED' } -- Redis lost it, and no other has it: the next look takes it
end
if string.sub(lock, 1, #mine) ~= mine then
  return { 'SUPERSEDED' }
end
local facts = facts_of(KEYS[1], engine)
if not facts or facts.expires <= now then
  return { 'UNKNOWN' } -- nobody would count its pause: its host has been cut off, and beats first
end
if redis.call('HEXISTS', KEYS[4], 'manifest:' .. ARGV[9]) == 0 then
  return { 'GONE' }
end
if facts.fleet ~= 'eval' and (ARGV[7] ~= '1' or facts.state == 'routable') then
  local most, share = tonumber(ARGV[4]), tonumber(ARGV[8])
  if share > 0 and facts.state == 'routable' then
    local serving = 0
    local everybody = redis.call('HVALS', KEYS[1])
    for i = 1, #everybody do
      local theirs = cjson.decode(everybody[i])
      if theirs.state == 'routable' and theirs.fleet ~= 'eval' and theirs.expires > now then
        serving = serving + 1
      end
    end
    most = math.min(most, math.max(1, math.floor(serving * (1 - share) + 1e-6)))
  end
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
  if held + ahead >= most then
    redis.call('HSET', KEYS[3], 'claim:' .. engine, ms(now + ARGV[6]))
    return { 'WAIT' }
  end
  redis.call('HSET', KEYS[3], 'held:' .. engine, ms(now + ARGV[5]))
  facts.expires = math.max(facts.expires, now + ARGV[6]) -- asking is a sign of life, and between here and its next beat the pause must count
  keep_facts(KEYS[1], engine, facts)
end
redis.call('HDEL', KEYS[3], 'claim:' .. engine)
pin(KEYS[5], applying(engine, ARGV[9]), ARGV[9], now + ARGV[10])
redis.call('HSET', KEYS[2], engine, mine .. ms(now + ARGV[5]))
return { 'OK' }
