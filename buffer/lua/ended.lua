-- requires: retention
-- ARGV: step. By whom it was trained, its digest and when, in ms; or nothing.
local at, _, incarnation = ending(ARGV[3])
if not at or tonumber(ARGV[3]) > num('trained') then return {'OK'} end
return {'OK', incarnation, call('HGET', DIGESTS, ARGV[3]), whole(at)}
