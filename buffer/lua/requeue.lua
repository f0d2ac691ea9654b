-- requires: groups letters
-- Dead letters -> RELEASED, their failures forgotten. ARGV: seqs. Those that were letters.
local reply, names = {'OK'}, {}
for i = 3, #ARGV do
  local seq, raw = ARGV[i], call('HGET', LETTERS, ARGV[i])
  local row = call('HGET', GROUPS, seq)
  if raw and row and (row == 'T' or cjson.decode(row).s ~= 'dead') then -- it was made good since
    drop_letter(seq)
  elseif raw then
    local letter = cjson.decode(raw)
    drop_letter(seq)
    keep(seq, {s = 'released', a = letter.a, f = 0, t = '', p = letter.p, r = letter.r})
    call('ZADD', RETRY, seq, seq)
    add('dead:' .. letter.r, -1)
    reply[#reply + 1], names[#names + 1] = tonumber(seq), seq
  end
end
if #names > 0 then
  audit('requeued', '{"seqs":[' .. table.concat(names, ',') .. ']}')
  wake('slot')
end
return reply
