-- Keys of which messages wait in inboxes because one failed, longest first. $1 consumer or null, $2 limit.
select m.consumer, m.ordering_key, h.message_id::text, count(*), h.attempts::bigint,
       extract(epoch from clock_timestamp() - min(m.received_at))::float8,
       greatest(extract(epoch from h.due_at - clock_timestamp()), 0)::float8, h.last_error
  from postroom.inbox_messages h
  join postroom.inbox_messages m
    on m.consumer = h.consumer and m.ordering_key = h.ordering_key and m.state in ('new', 'ready', 'behind', 'claimed')
 where h.state = 'ready' and h.attempts > 0 and h.ordering_key is not null and ($1::text is null or h.consumer = $1)
 group by m.consumer, m.ordering_key, h.message_id, h.attempts, h.due_at, h.last_error
 order by 6 desc limit $2
