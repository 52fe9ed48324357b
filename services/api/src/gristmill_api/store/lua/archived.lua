#!lua flags=allow-oom
-- include: _keys.lua
-- include: _moves.lua
-- These trained groups are on the archive's disk, or given up for it: their bytes go. Others are passed over.
-- ARGV: value of the archiver's lease, '1' when they are given up, group id...
-- -> {MISSING} | {FENCED} | {OK, groups}
if not state() then return {'MISSING'} end
if redis.call('GET', ARCHIVER) ~= ARGV[1] then return {'FENCED'} end
local gone = 0
for i = 3, #ARGV do
  if redis.call('LREM', ARCHIVE, 1, ARGV[i]) == 1 then
    if ARGV[2] == '1' then log_fate(ARGV[i], 'let_go', 'archive_lost') end
    delete_group(ARGV[i])
    gone = gone + 1
  end
end
if ARGV[2] == '1' and gone > 0 then redis.call('HINCRBY', COUNTERS, 'archive_lost', gone) end
return {'OK', gone}
