-- requires: free
-- Rule T5. ARGV: incarnation, step, incarnation of the checkpoint, digest, path, keep.
local incarnation, step, from, count = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[8])
if step > num('trained') or from ~= incarnation then
  return {'STEP_ORDER', 'checkpoint ' .. step .. ' of incarnation ' .. from .. ': step ' .. num('trained') .. ' of incarnation ' .. incarnation .. ' is the newest trained'}
end
local all, known = cjson.decode(get('checkpoints') or '[]'), false
for _, one in ipairs(all) do
  if one[1] == step then known = true end
end
local newest = #all > 0 and all[#all][1] or -1
if not known then
  if step < newest then return {'STEP_ORDER', 'checkpoint ' .. step .. ': a newer one, ' .. newest .. ', is registered'} end
  all[#all + 1] = {step, from, ARGV[6], ARGV[7]}
end
while #all > count do table.remove(all, 1) end
local floor = num('floor')
if #all >= count then floor = math.max(floor, all[1][1]) end

local encoded, kept = cjson.encode(all), {}
for i, one in ipairs(all) do kept[i] = '[' .. one[1] .. ',' .. one[2] .. ']' end
call('HSET', STATE, 'checkpoints', encoded, 'floor', floor)
local freed = free()
compact()
if not known then
  audit('checkpoint', '{"step":' .. step .. ',"incarnation":' .. from .. ',"path":' .. text(ARGV[7]) .. ',"kept":[' .. table.concat(kept, ',') .. '],"freed":' .. freed .. '}')
end
if freed > 0 then wake('slot') end
return {'OK', encoded}
