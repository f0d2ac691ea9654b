-- requires: groups release
-- ARGV: seq, token, reason, why, lengths (JSON) or ''. Asked again after a lost reply, it changes nothing.
local seq, token, reason = ARGV[3], ARGV[4], ARGV[5]
local g = group(seq)
if not g or g.t ~= token then return {'SLOT_LOST'} end
if (g.s == 'released' or g.s == 'dead') and g.r == reason then return {'OK'} end
if g.s ~= 'generating' then return {'SLOT_LOST'} end
release(seq, g, reason, ARGV[6], ARGV[7] ~= '' and ARGV[7])
wake('slot')
return {'OK'}
