-- GROUPS: seq -> JSON {s state, a attempt, f counted failures, t slot token, o owner, p prompt id, m bytes charged, b bytes stored,
-- v tokens by version, r reason, x some extras lie in blobs}. b is 0 once the payload is spilled. Once its journal entry is dropped a TRAINED group is "T"
-- until `compact` passes it. Rows below low_seq are of groups that were queued again.
local function group(seq)
  local raw = call('HGET', GROUPS, seq)
  if raw and raw ~= 'T' then return cjson.decode(raw) end
  return nil
end
local function keep(seq, g) call('HSET', GROUPS, seq, cjson.encode(g)) end
local function payload_name(seq, g) return seq .. ':' .. g.a .. ':' .. g.t end

-- A payload that nobody needs any more, with the group's blobs unless a recording refers to them. Of what is spilled nothing is left here.
local function drop_payload(seq, g, recorded)
  if g.b == 0 then return end
  local name = payload_name(seq, g)
  if DOOMED then
    call('SREM', TO_PERSIST, name)
    call('SADD', DOOMED, name)
  else
    call('UNLINK', ARGV[2] .. name)
  end
  if g.x and not recorded then call('SADD', DOOMED_BLOBS, name) end
end
