-- KEYS: audit   ARGV: op, fields as JSON
return redis.call('XADD', KEYS[1], '*', 'op', ARGV[1], 'd', ARGV[2])
