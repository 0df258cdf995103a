#!lua flags=allow-oom
-- Keeps a consumer group that a session has taken, and moves it. KEYS: the stream. ARGV: the group, the note as it is, the note
-- as it is to be, the place as it is, the place as it is to be, how many entries are before that (-1: nobody knows), and whether entries
-- that all groups are behind are removed.
local key, group, note, new_note, was, place, count, removes = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]
local function field(list, name)
  for i = 1, #list, 2 do if list[i] == name then return list[i + 1] end end
end
-- Ids as texts of one length: numbers of Lua have 53 bits.
local function sortable(id)
  local ms, number = string.match(id, '^(%d+)%-(%d+)$')
  return string.rep('0', 20 - #ms) .. ms .. '-' .. string.rep('0', 20 - #number) .. number
end
local consumers = redis.call('xinfo', 'consumers', key, group)
if #consumers ~= 1 or field(consumers[1], 'name') ~= note then return { 'gone' } end
local groups = redis.call('xinfo', 'groups', key)
local counted = false
for _, found in ipairs(groups) do
  if field(found, 'name') == group then counted = field(found, 'entries-read') end
  if field(found, 'name') == group and field(found, 'last-delivered-id') ~= was then
    -- The session ends over this, and the next one goes on from there.
    redis.call('xgroup', 'createconsumer', key, group, (string.gsub(note, '^(postroom %S+) %S+', '%1 free')))
    redis.call('xgroup', 'delconsumer', key, group, note)
    return { 'moved', field(found, 'last-delivered-id') }
  end
end
if new_note ~= note then
  redis.call('xgroup', 'createconsumer', key, group, new_note)
  redis.call('xgroup', 'delconsumer', key, group, note)
else
  -- The server remembers when a consumer has asked last; nothing was ever handed to this one.
  redis.call('xreadgroup', 'group', group, note, 'count', 1, 'streams', key, '0')
end
if place ~= was or (count >= 0 and counted ~= count) then
  if count >= 0 then
    redis.call('xgroup', 'setid', key, group, place, 'entriesread', count)
  else
    redis.call('xgroup', 'setid', key, group, place)
  end
end
if removes == '1' then
  local lowest = place
  for _, found in ipairs(groups) do
    local name, low = field(found, 'name'), field(found, 'last-delivered-id')
    if name ~= group then
      if field(found, 'pending') > 0 then
        local first = redis.call('xpending', key, name)[2]
        if first and sortable(first) < sortable(low) then low = first end
      end
      if sortable(low) < sortable(lowest) then lowest = low end
    end
  end
  redis.call('xtrim', key, 'minid', '=', lowest)
end
return { 'kept' }
