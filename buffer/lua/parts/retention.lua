local SPILL_LIMIT = 1000

-- ENDS: trained step -> "incarnation:milliseconds:bytes": by whom, when, and the bytes of all steps up to it as they were trained.
local function ending(step)
  local raw = call('HGET', ENDS, step)
  if not raw then return nil end
  local incarnation, at, bytes = string.match(raw, '^(%d+):(%d+):(%d+)$')
  return tonumber(at), tonumber(bytes), tonumber(incarnation)
end
local function bytes_up_to(step)
  local _, bytes = ending(step)
  return bytes or num('dropped_bytes')
end
-- It was trained now; so many bytes of payloads are here.
local function end_step(step, incarnation, bytes)
  call('HSET', ENDS, step, incarnation .. ':' .. whole(now_ms()) .. ':' .. whole(bytes_up_to(step - 1) + bytes))
  if num('spilled') >= step then call('HSET', STATE, 'spilled', step - 1) end -- what the spill has of it is of a line that was given up
end

-- The newest step that may leave the journal: the oldest kept checkpoint covers it, and it is over a limit of the retention.
local function retired()
  local floor, dropped, retention, bytes, ms = nums('floor', 'dropped', 'retention', 'retention_bytes', 'retention_ms')
  local newest = math.max(dropped, floor - retention)
  if newest >= floor or (bytes == 0 and ms == 0) then return newest end
  local total, before, since = bytes_up_to(floor), bytes_up_to(newest), now_ms() - ms
  while newest < floor do
    local at, so_far = ending(newest + 1)
    if at and not (bytes > 0 and total - before > bytes) and not (ms > 0 and at < since) then break end
    newest, before = newest + 1, so_far or before
  end
  return newest
end

-- Steps whose payloads should leave Redis, ascending: they are over the retention, or trained bytes fill over half the budget. They leave in order.
local function to_spill(limit)
  local found, spill, spilled, dropped, trained, held, budget = {}, nums('spill', 'spilled', 'dropped', 'trained', 'trained_bytes', 'budget')
  if spill ~= 1 then return found end
  local step, over, half = math.max(spilled, dropped), retired(), budget / 2
  local before = bytes_up_to(step)
  while #found < limit and step < trained and (step < over or held > half) do
    step = step + 1
    local so_far = bytes_up_to(step)
    found[#found + 1] = step
    held, before = held - (so_far - before), so_far
  end
  return found
end
