-- requires: groups release

local SWEEP_LIMIT = 64

-- Rule S4: the ledger clock follows the server's, at most 1 s a call. Returns both, in ms.
local function tick()
  local now, clock, seen = now_ms(), nums('clock', 'seen')
  if seen > 0 then clock = clock + math.max(0, math.min(1000, now - seen)) end
  call('HSET', STATE, 'clock', clock, 'seen', now)
  return clock, now
end

-- Slots whose deadline passed come back, a bounded number a call.
local function sweep(clock)
  local expired = call('ZRANGEBYSCORE', DEADLINES, '-inf', clock - 1, 'LIMIT', 0, SWEEP_LIMIT)
  for _, seq in ipairs(expired) do release(seq, group(seq), 'expired') end
  if #expired > 0 then wake('slot') end
end
