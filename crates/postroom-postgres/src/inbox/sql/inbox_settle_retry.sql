-- A claimed message is tried again. $1 consumer, $2 id, $3 claim, $4 seconds to wait, $5 attempts burned, $6 error.
update postroom.inbox_messages
   set state = 'ready', attempts = $5, claims = 0, claimed_by = null, last_error = $6,
       history = postroom.failure_noted(history, $5, $6),
       due_at = clock_timestamp() + $4::float8 * interval '1 second', waits_since = clock_timestamp()
 where consumer = $1 and message_id = $2 and claim = $3 and state = 'claimed'
