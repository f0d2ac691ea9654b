-- A write for those that wait until the server has made everything before it durable. KEYS: state   ARGV: any value
redis.call('HSET', KEYS[1], 'durable', ARGV[1])
return 1
