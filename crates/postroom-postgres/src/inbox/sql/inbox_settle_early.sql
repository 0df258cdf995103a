-- A claimed message waits for an earlier version. $1 consumer, $2 id, $3 claim, $4 seconds of the window.
update postroom.inbox_messages
   set state = 'aside', window_over = false, claims = 0, claimed_by = null,
       due_at = clock_timestamp() + $4::float8 * interval '1 second', waits_since = clock_timestamp()
 where consumer = $1 and message_id = $2 and claim = $3 and state = 'claimed'
