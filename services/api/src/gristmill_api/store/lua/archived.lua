#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- These trained groups are on the archive's disk, or given up for it: their bytes go. Others are passed over.
-- ARGV: group id...
-- -> {MISSING} | {OK, groups}
if not state() then return {'MISSING'} end
local gone = 0
for _, id in ipairs(ARGV) do
  if redis.call('LREM', ARCHIVE, 1, id) == 1 then
    forget(id)
    gone = gone + 1
  end
end
return {'OK', gone}
