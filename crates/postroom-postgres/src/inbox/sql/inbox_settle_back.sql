-- Nothing of a claimed message was begun. $1 consumer, $2 id, $3 claim.
update postroom.inbox_messages
   set state = case when window_over then 'aside' else 'ready' end, claims = claims - 1, claimed_by = null, due_at = clock_timestamp(),
       waits_since = clock_timestamp()
 where consumer = $1 and message_id = $2 and claim = $3 and state = 'claimed'
