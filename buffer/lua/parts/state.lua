-- What every script has. KEYS in the order of `RedisLedger`; ARGV[1] wake-up channel, ARGV[2] prefix of payload keys.
-- A script answers {code, ...}; "OK" is success, any other code left everything as it was. Order inside a script (rule L1): validate, free, write.
local call = redis.call
local STATE, FORKS, AUDIT, ROUTABLE = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local GROUPS, HEADERS, READY, RETRY, DEADLINES = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local STEPS, CHUNKS, DIGESTS = KEYS[10], KEYS[11], KEYS[12]
local REQUESTS, REQUEST_TIMES, READY_VERSIONS = KEYS[13], KEYS[14], KEYS[15]
local ENDS, LETTERS, LETTER_SEQS, LETTER_TIMES, READERS, DOOMED_BLOBS = KEYS[16], KEYS[17], KEYS[18], KEYS[19], KEYS[20], KEYS[21]
-- On a cluster payloads lie in other slots, where no script may touch them. There, and only there, two more keys are passed: what `RedisLedger.sweep` is to
-- make permanent, and what it is to delete (rule P1).
local TO_PERSIST, DOOMED = KEYS[22], KEYS[23]
local UNPACK_LIMIT = 4000 -- Lua takes fewer than 8000 values at once

local function get(name) return call('HGET', STATE, name) end
local function num(name) return tonumber(call('HGET', STATE, name) or '0') end
-- As many numbers as names, in one call.
local function nums(...)
  local found = call('HMGET', STATE, ...)
  for i = 1, #found do found[i] = tonumber(found[i] or '0') end
  return unpack(found)
end
local function add(name, by) if by ~= 0 then call('HINCRBY', STATE, name, by) end end
-- One command for a whole list of members, or of pairs; none for an empty one.
local function many(command, key, list)
  for at = 1, #list, UNPACK_LIMIT do call(command, key, unpack(list, at, math.min(#list, at + UNPACK_LIMIT - 1))) end
end
local function text(value) return cjson.encode(tostring(value)) end
local function whole(number) return string.format('%.0f', number) end
local function wake(topic) call('PUBLISH', ARGV[1], topic) end
local function audit(op, json) call('XADD', AUDIT, '*', 'op', op, 'd', json) end
local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
