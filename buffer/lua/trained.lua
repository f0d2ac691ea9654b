-- requires: free groups journal retention rewind
-- Rule T4, and V1: an equal digest is the same version. ARGV: incarnation, step, digest, stats (JSON).
local incarnation, step, digest = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local trained = num('trained')
local function reply()
  local newest = 0
  for _, one in ipairs(cjson.decode(get('checkpoints') or '[]')) do newest = math.max(newest, one[1]) end
  local wanted = num('trained_bytes') * 2 > num('budget') and newest < step and get('spill') ~= '1' -- a spill frees bytes by itself
  return {'OK', step, call('HGETALL', FORKS), wanted and 1 or 0}
end
if step == trained and num('trained_by') == incarnation and call('HGET', DIGESTS, step) == digest then return reply() end
local record = step_record(step)
if step ~= trained + 1 or not record then return {'STEP_ORDER', 'trained(' .. step .. '): the newest trained step is ' .. trained} end
local seqs = {}
for chunk = 0, chunks_in(record) - 1 do
  local entry = chunk_of(step, chunk)
  if not entry or #entry.seqs < entry.n then return {'STEP_ORDER', 'trained(' .. step .. '): chunk ' .. chunk .. ' has not been leased in full'} end
  for _, seq in ipairs(entry.seqs) do seqs[#seqs + 1] = seq end
end

free()
compact()
local bytes = 0
for _, seq in ipairs(seqs) do
  local g = group(seq)
  g.s = 'trained'
  keep(seq, g)
  bytes = bytes + g.b
end
add('leased', -#seqs)
add('trained_groups', #seqs)
add('trained_bytes', bytes)
end_step(step, incarnation, bytes)

local known = call('HGET', DIGESTS, step)
if known == digest then
  local parent, fork, id = string.match(call('HGET', FORKS, incarnation), '^(%d+):(%d+):(.*)$')
  if parent ~= '0' and tonumber(fork) == step - 1 then call('HSET', FORKS, incarnation, parent .. ':' .. step .. ':' .. id) end
elseif known then
  part(step)
end
call('HSET', DIGESTS, step, digest)
call('HSET', STATE, 'trained', step, 'trained_by', incarnation)
audit('trained', '{"step":' .. step .. ',"incarnation":' .. incarnation .. ',"digest":' .. text(digest) .. ',"groups":' .. #seqs .. ',"stats":' .. ARGV[6] .. '}')
wake('slot')
return reply()
