-- READY: seq by what it is selected by (`Policy.score`). READY_VERSIONS: version -> tokens of the READY groups.

-- `versions`: tokens by version that groups bring to READY (sign 1), or take from it (-1).
local function count_versions(versions, sign)
  for version, tokens in pairs(versions) do
    if call('HINCRBY', READY_VERSIONS, version, sign * tokens) <= 0 then call('HDEL', READY_VERSIONS, version) end
  end
end

-- `sum` with the tokens of one more group, so that many are counted at once.
local function sum_versions(sum, versions)
  for version, tokens in pairs(versions) do sum[version] = (sum[version] or 0) + tokens end
end
