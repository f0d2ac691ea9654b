-- requires: groups letters ready
-- For the scripts of reassert (rule R1): groups become TRAINED, whatever they were.

-- A group out of whatever counts it.
local function detach(seq, g)
  if g.s == 'generating' then
    call('ZREM', DEADLINES, seq)
  elseif g.s == 'ready' then
    call('ZREM', READY, seq)
    count_versions(g.v, -1)
  elseif g.s == 'leased' then
    add('leased', -1)
  elseif g.s == 'released' then
    call('ZREM', RETRY, seq)
  elseif g.s == 'dead' then
    add('dead:' .. g.r, -1)
    drop_letter(seq)
  else
    add('trained_groups', -1)
    add('trained_bytes', -g.b)
  end
  add('bytes', -(g.s == 'generating' and g.m or g.b or 0))
end

local function holds_payload(g) return (g.s == 'generating' and g.m or g.b or 0) > 0 end

-- A group without a row: it has come to its end, DEAD if there is a letter of it, else TRAINED. Then it counts as neither.
local function exhume(seq)
  local letter = call('HGET', LETTERS, seq)
  if letter then
    add('dead:' .. cjson.decode(letter).r, -1)
    drop_letter(seq)
  else
    add('trained_groups', -1)
  end
end

-- TRAINED and freed. The spill may have it already, and refer to its blobs: they stay.
local function settle(seq)
  local raw = call('HGET', GROUPS, seq)
  if raw == 'T' then return end
  if not raw then
    exhume(seq)
    add('trained_groups', 1)
    return
  end
  local g = group(seq)
  detach(seq, g)
  if holds_payload(g) then drop_payload(seq, g, get('spill') == '1') end
  call('HDEL', HEADERS, seq)
  add('trained_groups', 1)
  if seq < num('low_seq') then call('HDEL', GROUPS, seq) else call('HSET', GROUPS, seq, 'T') end
end

-- TRAINED by this attempt, `to`. A payload that went with the loss holds no bytes; on a cluster the caller has looked. Returns its bytes.
local function train(seq, to, header)
  local raw, name = call('HGET', GROUPS, seq), payload_name(seq, to)
  if raw == 'T' or not raw then
    exhume(seq)
  else
    local g = group(seq)
    detach(seq, g)
    if g.t ~= to.t and holds_payload(g) then drop_payload(seq, g) end
    to.f, to.p = g.f, g.p
  end
  if DOOMED then
    if to.b > 0 then
      call('SADD', TO_PERSIST, name)
      call('SREM', DOOMED, name)
    end
  elseif call('STRLEN', ARGV[2] .. name) == to.b then
    call('PERSIST', ARGV[2] .. name)
  else
    to.b = 0
  end
  keep(seq, to)
  call('HSET', HEADERS, seq, header)
  add('trained_groups', 1)
  add('trained_bytes', to.b)
  add('bytes', to.b)
  return to.b
end

local function audit_reasserted(step, incarnation, digest, seqs)
  audit('reasserted', '{"step":' .. step .. ',"incarnation":' .. incarnation .. ',"digest":' .. text(digest) .. ',"seqs":[' .. table.concat(seqs, ',') .. ']}')
end

-- Another trainer may have attached since.
local function replaced(incarnation, id)
  local attached, known = num('incarnation'), get('incarnation_id') or ''
  if attached > incarnation or (attached == incarnation and id ~= '' and known ~= '' and id ~= known) then return {'FENCED', attached} end
  return nil
end
