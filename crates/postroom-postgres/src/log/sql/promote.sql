-- The first message left of each key becomes its head, so that it can be claimed. Run after every change to these keys.
-- $1 route, $2 ordering keys.
update postroom.parked q
   set state = 'retry', due_at = clock_timestamp(), waits_since = clock_timestamp()
  from (select distinct k as ordering_key from unnest($2::text[]) k) keys
 where q.route = $1 and q.state = 'queued'
   and q.seq = (select p.seq from postroom.parked p
                 where p.route = $1 and p.ordering_key = keys.ordering_key and p.state <> 'scheduled'
                 order by p.seq limit 1)
