-- Renews the lease of a filler; no row: somebody else has taken over. One that hangs before it commits holds the row for five
-- seconds at most. $1 consumer, $2 owner, $3 epoch, $4 milliseconds.
update postroom.inbox_fillers
   set lease_ms = $4::bigint, expires_at = clock_timestamp() + $4::float8 * interval '1 millisecond'
 where consumer = $1 and owner = $2 and epoch = $3
   and pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true) is not null
