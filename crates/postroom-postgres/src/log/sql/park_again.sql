-- A parked message failed once more. $1 route, $2 seqs, $3 attempts, $4 waits in milliseconds, $5 errors.
update postroom.parked q
   set state = 'retry', attempts = p.attempts, due_at = clock_timestamp() + p.wait_ms * interval '1 millisecond',
       waits_since = clock_timestamp(), last_error = p.error, history = postroom.failure_noted(q.history, p.attempts, p.error)
  from unnest($2::bigint[], $3::int[], $4::bigint[], $5::text[]) as p (seq, attempts, wait_ms, error)
 where q.route = $1 and q.seq = p.seq
