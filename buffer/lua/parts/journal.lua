-- STEPS: step -> the incarnation that judges its next chunk, step:incarnation -> the record. CHUNKS: step:chunk -> JSON {revision, n groups when full, seqs,
-- i incarnation of the record, l incarnation that leased it last}. DIGESTS: step -> digest of its weights.

-- The record a step's next chunk is judged by, also as it is stored.
local function step_record(step)
  local current = call('HGET', STEPS, step)
  if not current then return nil end
  local raw = call('HGET', STEPS, step .. ':' .. current)
  return raw and cjson.decode(raw), raw
end
local function chunk_of(step, chunk)
  local raw = call('HGET', CHUNKS, step .. ':' .. chunk)
  return raw and cjson.decode(raw)
end
local function keep_chunk(step, chunk, entry) call('HSET', CHUNKS, step .. ':' .. chunk, cjson.encode(entry)) end
local function chunks_in(record) return math.ceil(record.groups / record.chunk) end

-- {'OK', step, chunk, revision, last, step record, header, ...}. `record` is any of the step: they differ in what is fresh, not in size.
local function chunk_reply(record, chunk, entry)
  local judged_by = call('HGET', STEPS, record.step .. ':' .. entry.i)
  local reply = {'OK', record.step, chunk, entry.revision, chunk == chunks_in(record) - 1 and 1 or 0, judged_by}
  for at = 1, #entry.seqs, UNPACK_LIMIT do
    local last = math.min(#entry.seqs, at + UNPACK_LIMIT - 1)
    for _, header in ipairs(call('HMGET', HEADERS, unpack(entry.seqs, at, last))) do reply[#reply + 1] = header end
  end
  return reply
end
