-- What every script of the weight channel uses.

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function ms(number)
  return string.format('%.0f', number)
end

-- "2:7" → 2, 7; anything else sorts before every version
local function parse(version)
  local incarnation, n = string.match(version or '', '^(%d+):(%d+)$')
  return tonumber(incarnation or -1), tonumber(n or -1)
end

local function older(a, b)
  local a_incarnation, a_n = parse(a)
  local b_incarnation, b_n = parse(b)
  if a_incarnation ~= b_incarnation then
    return a_incarnation < b_incarnation
  end
  return a_n < b_n
end

-- Whether an engine that served b would go back with a. Within an incarnation only (rule V3): a lower one is where the pointer is after Redis lost the higher (R1).
local function goes_back(a, b)
  local a_incarnation, a_n = parse(a)
  local b_incarnation, b_n = parse(b)
  return a_incarnation == b_incarnation and a_n < b_n
end

local function facts_of(key, engine)
  local raw = redis.call('HGET', key, engine)
  return raw and cjson.decode(raw) or nil
end

local function keep_facts(key, engine, facts)
  redis.call('HSET', key, engine, cjson.encode(facts))
end

local function superseded(facts, boot)
  for _, other in pairs(facts.superseded) do
    if other == boot then
      return true
    end
  end
  return false
end

local function pin(key, holder, version, expires)
  redis.call('HSET', key, holder, version .. ':' .. ms(expires))
end

-- Holder of the pin on a version that an engine may be loading
local function applying(engine, version)
  return engine .. '/applying/' .. version
end

-- An engine holds nothing any more.
local function unpin(key, engine)
  redis.call('HDEL', key, engine .. '/serving', engine .. '/target')
  for _, holder in ipairs(redis.call('HKEYS', key)) do
    if holder == applying(engine, string.match(holder, '%d+:%d+$') or '') then
      redis.call('HDEL', key, holder)
    end
  end
end

local function audit(key, op, fields)
  redis.call('XADD', key, '*', 'op', op, 'd', cjson.encode(fields))
end

-- An engine is out of the registry, and its last status tells how it was used. Empty the other keys of it besides.
local function strike(engines, facts, routable, audit_key, engine, boot, reason)
  local left = { engine_id = engine, boot_nonce = boot, reason = reason }
  local raw = redis.call('HGET', engines, engine)
  local ok, status = pcall(cmsgpack.unpack, raw or '')
  if ok and type(status) == 'table' then -- else it never beat, or something else is written there
    for _, name in ipairs({ 'busy_s', 'uptime_s', 'paused_s', 'generated_tokens', 'updates' }) do
      left[name] = status[name]
    end
  end
  redis.call('HDEL', engines, engine)
  redis.call('HDEL', facts, engine)
  redis.call('HDEL', routable, engine)
  audit(audit_key, 'engine_left', left)
end
