#!lua flags=allow-oom
-- Takes a consumer group for a session. KEYS: the stream. ARGV: the group, the receiver (whose session before may have ended without a word), the consumer, and after how many
-- milliseconds of silence another session counts as gone. Makes the stream and the group where they are missing.
local key, group, session, whose, gone_after = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local function field(list, name)
  for i = 1, #list, 2 do if list[i] == name then return list[i + 1] end end
end
local function find()
  for _, found in ipairs(redis.call('xinfo', 'groups', key)) do
    if field(found, 'name') == group then return found end
  end
end
local is_there = redis.call('exists', key) == 1
local found = is_there and find()
local made = 0
if not found then
  -- What was removed before anybody received is nobody's loss.
  local removed = 0
  if is_there then
    local stream = redis.call('xinfo', 'stream', key)
    removed = field(stream, 'entries-added') - field(stream, 'length')
  end
  redis.call('xgroup', 'create', key, group, '0', 'mkstream', 'entriesread', removed)
  found, made = find(), 1
end
local reserved, old, foreign, pending = '', false, false, 0
local place, count = field(found, 'last-delivered-id'), field(found, 'entries-read') or -1
for _, consumer in ipairs(redis.call('xinfo', 'consumers', key, group)) do
  local name = field(consumer, 'name')
  local until_id, who, at, before, owner = string.match(name, '^postroom (%d+%-%d+) (%S+) (%d+%-%d+) (%-?%d+) (.*)$')
  if not who or old then
    foreign, pending = name, field(consumer, 'pending')
  else
    if owner ~= whose and owner ~= '' and whose ~= '' then return { 'owner', owner } end
    if who ~= 'free' and who ~= session and field(consumer, 'idle') < gone_after then return { 'busy', field(consumer, 'idle') } end
    reserved, old, place, count = until_id, name, at, tonumber(before)
  end
end
if foreign then return { 'foreign', foreign, pending, old and place or '', count } end
if field(found, 'pending') > 0 then return { 'pending', field(found, 'pending') } end
place, count = field(found, 'last-delivered-id'), field(found, 'entries-read') or -1
local stream = redis.call('xinfo', 'stream', key)
if reserved == '' then
  if made == 1 then reserved = '0-0' else reserved = field(stream, 'last-generated-id') end
end
local note = 'postroom ' .. reserved .. ' ' .. session .. ' ' .. place .. ' ' .. count .. ' ' .. whose
redis.call('xgroup', 'createconsumer', key, group, note)
if old and old ~= note then redis.call('xgroup', 'delconsumer', key, group, old) end
return { 'taken', place, count, note }
