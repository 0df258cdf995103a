-- Whether a filler still has its inbox; no row: somebody else has. The lock holds up a takeover until the end of this
-- transaction and does not hold up renewals. A filler that hangs in here must not hold the takeover up for ever, so the
-- server ends a transaction that is idle for five seconds. $1 consumer, $2 owner, $3 epoch.
select pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true)
  from postroom.inbox_fillers where consumer = $1 and owner = $2 and epoch = $3
   for key share
