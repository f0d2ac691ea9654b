-- Rule T7: readers of the journal that are live, {name, step, ...}. READERS: name -> "step:expires in ms". Forgets the others.
local function readers()
  local now, flat, live = now_ms(), call('HGETALL', READERS), {}
  for i = 1, #flat, 2 do
    local step, expires = string.match(flat[i + 1], '^(%d+):(%d+)$')
    if tonumber(expires) > now then
      live[#live + 1], live[#live + 2] = flat[i], step
    else
      call('HDEL', READERS, flat[i])
    end
  end
  return live
end
