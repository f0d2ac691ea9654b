-- requires: groups journal retention

local FREE_LIMIT, COMPACT_LIMIT = 4096, 16384

-- Drops journal entries that no kept checkpoint and no retention needs, with their payloads; a bounded number a call. With a spill, only of steps that it
-- has; the blobs they refer to are the spill's. Returns groups freed.
local function free()
  local target, dropped, freed, low = retired(), num('dropped'), 0, num('low_seq')
  if dropped < target and get('spill') == '1' then target = math.min(target, num('spilled')) end
  while dropped < target and freed < FREE_LIMIT do
    local step = dropped + 1
    local record = step_record(step)
    for chunk = 0, chunks_in(record) - 1 do
      local entry = chunk_of(step, chunk)
      local bytes = 0
      for _, seq in ipairs(entry.seqs) do
        local g = group(seq)
        drop_payload(seq, g)
        call('HDEL', HEADERS, seq)
        if seq < low then call('HDEL', GROUPS, seq) else call('HSET', GROUPS, seq, 'T') end
        bytes = bytes + g.b
      end
      add('bytes', -bytes)
      add('trained_bytes', -bytes)
      freed = freed + #entry.seqs
      call('HDEL', CHUNKS, step .. ':' .. chunk)
    end
    call('HDEL', STEPS, step)
    for incarnation = record.incarnation, 1, -1 do call('HDEL', STEPS, step .. ':' .. incarnation) end
    call('HDEL', DIGESTS, step)
    call('HSET', STATE, 'dropped', step, 'dropped_bytes', whole(bytes_up_to(step)))
    call('HDEL', ENDS, step)
    dropped = step
  end
  return freed
end

-- Rule T8: moves low_seq over everything TRAINED and freed, or DEAD.
local function compact()
  local low, high, from = num('low_seq'), num('next_seq'), num('low_seq')
  while low < high and low - from < COMPACT_LIMIT do
    local raw = call('HGET', GROUPS, low)
    if raw ~= 'T' and cjson.decode(raw).s ~= 'dead' then break end
    call('HDEL', GROUPS, low)
    low = low + 1
  end
  if low > from then call('HSET', STATE, 'low_seq', low) end
end
