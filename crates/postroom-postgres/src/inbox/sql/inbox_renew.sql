-- Renews claims. $1 consumer, $2 ids, $3 claims, parallel arrays; $4 seconds of the lease.
update postroom.inbox_messages m set due_at = clock_timestamp() + $4::float8 * interval '1 second', waits_since = clock_timestamp()
  from unnest($2::uuid[], $3::bigint[]) as c (id, claim)
 where m.consumer = $1 and m.message_id = c.id and m.claim = c.claim and m.state = 'claimed'
