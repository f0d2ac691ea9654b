-- requires: groups journal release
-- For scripts that take steps back (rules T1, T5, T6, R1).

-- TRAINED -> LEASED, in the same chunk.
local function untrain(seq, g)
  if g.s ~= 'trained' then return end
  g.s = 'leased'
  keep(seq, g)
  add('trained_groups', -1)
  add('leased', 1)
  add('trained_bytes', -g.b)
end

-- Gives up a journalled step: its groups become RELEASED, for another to take.
local function drop_step(step)
  local record = step_record(step)
  for chunk = 0, chunks_in(record) - 1 do
    local entry = chunk_of(step, chunk)
    for _, seq in ipairs(entry and entry.seqs or {}) do
      local g = group(seq)
      untrain(seq, g)
      if g.b == 0 then g.x = nil end -- the spill has the payload and refers to its blobs
      release(seq, g, 'rewound')
    end
    call('HDEL', CHUNKS, step .. ':' .. chunk)
  end
  call('HDEL', STEPS, step)
  for incarnation = record.incarnation, 1, -1 do call('HDEL', STEPS, step .. ':' .. incarnation) end
  call('HDEL', DIGESTS, step)
  call('HDEL', ENDS, step)
end

-- All journalled steps after this one.
local function drop_steps_after(step)
  step = math.max(step, num('dropped')) + 1
  while step_record(step) do
    drop_step(step)
    step = step + 1
  end
end

-- After steps were given up: a slot may ask for a version that the line reaches only once the slot is filled. Its owner hears it is lost.
local function drop_slots()
  for _, seq in ipairs(call('ZRANGE', DEADLINES, 0, -1)) do release(seq, group(seq), 'rewound') end
end

-- On-policy, what other weights wrote is of no use.
local function drop_ready()
  for _, seq in ipairs(call('ZRANGE', READY, 0, -1)) do release(seq, group(seq), 'rewound') end
end

-- Other weights came out of a replayed step: the lines part here for good, and what the parent trained later is nothing to compare with. On-policy, what was
-- taken for later steps goes with the old line (rule T6).
local function part(step)
  if get('on_policy') == '1' then
    drop_steps_after(step)
    drop_slots()
    drop_ready()
    wake('slot')
    return
  end
  local later = step + 1
  while call('HEXISTS', DIGESTS, later) == 1 do
    call('HSET', DIGESTS, later, '')
    later = later + 1
  end
end
