-- requires: journal retention rewind settle
-- Rule R1, for each step: it is journalled and TRAINED. ARGV: incarnation, its id, step, digest, the incarnation that trained it, its checkpoint (JSON list),
-- chunks (JSON: [chunk, revision, incarnation of the record, [[seq, attempt, token, bytes, tokens by version, extras in blobs], ...]]), then of each chunk in
-- order its record and its headers.
local incarnation, id, step, digest, by = tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local refused = replaced(incarnation, id)
if refused then return refused end
if num('incarnation') ~= incarnation or num('trained') ~= step - 1 then
  return {'REGRESSED', num('incarnation') .. ', step ' .. num('trained') .. ', while step ' .. step .. ' was being re-asserted'}
end
local at, bytes, seqs = 9, 0, {}
for _, one in ipairs(cjson.decode(ARGV[9])) do
  local entry, judged_by = {revision = one[2], n = #one[4], seqs = {}, i = one[3], l = by}, one[3]
  at = at + 1
  call('HSET', STEPS, step, judged_by, step .. ':' .. judged_by, ARGV[at])
  for _, of in ipairs(one[4]) do
    at = at + 1
    bytes = bytes + train(of[1], {s = 'trained', a = of[2], f = 0, t = of[3], b = of[4], v = of[5], x = of[6] and 1 or nil}, ARGV[at])
    entry.seqs[#entry.seqs + 1] = of[1]
    seqs[#seqs + 1] = of[1]
  end
  keep_chunk(step, one[1], entry)
end
local known = call('HGET', DIGESTS, step)
if known and known ~= digest then part(step) end
call('HSET', DIGESTS, step, digest)
end_step(step, by, bytes)
local kept = cjson.decode(get('checkpoints') or '[]')
for _, one in ipairs(cjson.decode(ARGV[8])) do kept[#kept + 1] = one end
call('HSET', STATE, 'trained', step, 'trained_by', by, 'checkpoints', #kept > 0 and cjson.encode(kept) or '[]')
audit_reasserted(step, by, digest, seqs)
return {'OK'}
