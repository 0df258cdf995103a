-- After the database's clock went back: what waits since a moment that has not come yet, waits from now on, no longer than it
-- was to wait then. What does not know since when was to be due at once. $1 route.
update postroom.parked p
   set due_at = case when p.waits_since is null then c.clock else p.due_at - (p.waits_since - c.clock) end, waits_since = c.clock
  from (select clock_timestamp() as clock) c
 where p.route = $1 and p.state in ('retry', 'scheduled')
   and (p.waits_since > c.clock + interval '2 seconds'
        or p.waits_since is null and p.state = 'retry' and p.due_at > c.clock + interval '2 seconds')
