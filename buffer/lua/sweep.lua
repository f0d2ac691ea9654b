-- requires: free slots
-- What takes place with nobody calling: slots expire, steps outlive the retention. ARGV: limit, '1' if the caller deletes blobs. Work for the caller, which
-- `swept` takes off the lists: payloads to persist, payloads to delete, blobs to delete.
sweep((tick()))
if free() > 0 then wake('slot') end
compact()
local limit = ARGV[3]
return {'OK', DOOMED and call('SRANDMEMBER', TO_PERSIST, limit) or {}, DOOMED and call('SRANDMEMBER', DOOMED, limit) or {},
  ARGV[4] == '1' and call('SRANDMEMBER', DOOMED_BLOBS, limit) or {}}
