-- requires: groups
-- Rule S5. ARGV: seq, token, prompt id. The id that is bound.
local seq, token, prompt = ARGV[3], ARGV[4], ARGV[5]
local g = group(seq)
if not g or g.s ~= 'generating' or g.t ~= token then return {'SLOT_LOST'} end
if not g.p then
  g.p = prompt
  keep(seq, g)
  audit('bound', '{"seq":' .. seq .. ',"prompt_id":' .. text(prompt) .. '}')
end
return {'OK', g.p}
