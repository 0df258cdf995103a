-- Renews the lease of a filler; no row: somebody else has taken over. One that hangs before it commits holds the row for five
-- seconds at most. $1 consumer, $2 owner, $3 epoch, $4 milliseconds, $5 what it receives from, $6 why nothing
-- can be received, or null.
update postroom.inbox_fillers
   set lease_ms = $4::bigint, expires_at = clock_timestamp() + $4::float8 * interval '1 millisecond',
       source = $5, source_error = $6,
       source_down_since = case when $6::text is not null then coalesce(source_down_since, clock_timestamp()) end
 where consumer = $1 and owner = $2 and epoch = $3
   and pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true) is not null
