-- Takes an inbox from the filler that was seen, if it has not renewed since. "for update" waits for a transaction of the old
-- filler that has passed its fence ("for key share"); a plain update would not. $1 consumer, $2 owner, $3 milliseconds of the
-- lease, $4 epoch and $5 renewal that were seen.
-- One that hangs before it commits holds the row for five seconds at most.
with seen as materialized (
    select consumer, pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true) from postroom.inbox_fillers
     where consumer = $1 and epoch = $4 and (extract(epoch from expires_at) * 1000000::numeric)::bigint = $5
       for update
)
update postroom.inbox_fillers f
   set owner = $2, epoch = f.epoch + 1, lease_ms = $3::bigint,
       expires_at = clock_timestamp() + $3::float8 * interval '1 millisecond',
       source = null, source_down_since = null, source_error = null
  from seen
 where f.consumer = seen.consumer
returning f.epoch
