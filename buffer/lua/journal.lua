-- requires: journal
-- ARGV: first step, last step. Steps' records, and chunks as `chunk_reply` gives them, in order.
local records, chunks = {}, {}
for step = math.max(tonumber(ARGV[3]), num('dropped') + 1), math.min(tonumber(ARGV[4]), num('trained') + 100000) do
  local record, raw = step_record(step)
  if not record then break end
  records[#records + 1] = raw
  for chunk = 0, chunks_in(record) - 1 do
    local entry = chunk_of(step, chunk)
    if entry then chunks[#chunks + 1] = chunk_reply(record, chunk, entry) end
  end
end
return {'OK', records, chunks}
