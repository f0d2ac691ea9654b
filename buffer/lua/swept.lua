-- requires: groups
-- ARGV: names of payloads that stay now or are gone, '', names of payloads that were deleted, '', names of groups whose blobs were deleted.
if call('HEXISTS', STATE, 'identity') == 0 then return {'RUN_MISSING'} end
local lists, at = {TO_PERSIST, DOOMED, DOOMED_BLOBS}, 1
for i = 3, #ARGV do
  local name = ARGV[i]
  if name == '' then
    at = at + 1
  else
    if at == 1 then -- somebody may have dropped it while it was made to stay
      local seq, attempt, token = string.match(name, '^(%d+):(%d+):(.*)$')
      local g = group(seq)
      local held = g and g.t == token and g.a == tonumber(attempt) and (g.s == 'ready' or g.s == 'leased' or g.s == 'trained') and g.b > 0
      if not held then call('SADD', DOOMED, name) end
    end
    call('SREM', lists[at], name)
  end
end
return {'OK'}
