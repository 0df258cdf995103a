-- The first filler of an inbox; no row: another was faster. $1 consumer, $2 owner, $3 milliseconds of the lease.
insert into postroom.inbox_fillers (consumer, owner, epoch, lease_ms, expires_at)
select $1, $2, 1, $3::bigint, clock_timestamp() + $3::float8 * interval '1 millisecond'
  from pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true)
    on conflict (consumer) do nothing
returning epoch
