-- Gives an inbox back. $1 consumer, $2 owner, $3 epoch.
update postroom.inbox_fillers set owner = null, expires_at = clock_timestamp()
 where consumer = $1 and owner = $2 and epoch = $3
   and pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true) is not null
