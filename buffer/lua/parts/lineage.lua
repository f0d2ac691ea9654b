-- The fork table and, for every incarnation on the attached one's line, the newest n that is shared (rule V2).
local function lineage(head)
  local flat, forks = call('HGETALL', FORKS), {}
  for i = 1, #flat, 2 do
    local parent, step = string.match(flat[i + 1], '^(%d+):(%d+)')
    forks[tonumber(flat[i])] = {parent = tonumber(parent), step = tonumber(step)}
  end
  head = head or num('incarnation')
  local limits, at = {[head] = math.huge}, head
  while forks[at] and forks[at].parent ~= 0 do
    limits[forks[at].parent] = math.min(forks[at].step, limits[at])
    at = forks[at].parent
  end
  return {forks = forks, limits = limits, head = head}
end

-- n' of a version string; nil for an incarnation this run does not have. Second value: the version's own n.
local function shared(line, version)
  local incarnation, n = string.match(version, '^(%d+):(%d+)$')
  incarnation, n = tonumber(incarnation), tonumber(n)
  local own, on_line = n, line.limits[incarnation] ~= nil
  while incarnation and line.limits[incarnation] == nil do
    local fork = line.forks[incarnation]
    if not fork then return nil end
    n = math.min(n, fork.step)
    incarnation = fork.parent
  end
  if not incarnation then return nil end
  n = math.min(n, line.limits[incarnation])
  return n, on_line and n == own
end
