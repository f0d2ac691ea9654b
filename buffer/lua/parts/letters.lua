-- LETTERS: seq -> JSON of a dead letter. LETTER_SEQS: them by seq, LETTER_TIMES by age.
local LETTER_LIMIT = 10000

local function drop_letter(seq)
  call('HDEL', LETTERS, seq)
  call('ZREM', LETTER_SEQS, seq)
  call('ZREM', LETTER_TIMES, seq)
end

-- A dead letter; the newest LETTER_LIMIT are kept.
local function keep_letter(seq, g, reason, why)
  call('HSET', LETTERS, seq, cjson.encode({a = g.a, f = g.f, p = g.p, r = reason, w = why, at = now_ms()}))
  call('ZADD', LETTER_SEQS, seq, seq)
  call('ZADD', LETTER_TIMES, call('HINCRBY', STATE, 'letter', 1), seq)
  if call('ZCARD', LETTER_TIMES) > LETTER_LIMIT then drop_letter(call('ZRANGE', LETTER_TIMES, 0, 0)[1]) end
end
