-- Moves dead letters of consumption back to the messages that wait, behind those of their key, with all their attempts before
-- them. $1 consumers, $2 seqs; parallel arrays.
with gone as (
    delete from postroom.dead_consume d
     using unnest($1::text[], $2::bigint[]) as c (consumer, seq)
     where d.consumer = c.consumer and d.seq = c.seq
    returning d.*
)
insert into postroom.inbox_messages as m
       (consumer, message_id, ordering_key, last_error, history, topic, type, payload, key, routing_key, content_type, headers,
        tenant_id, aggregate_type, aggregate_id, aggregate_version, occurred_at)
select consumer, message_id, ordering_key, error, history, topic, type, payload, key, routing_key, content_type, headers,
       tenant_id, aggregate_type, aggregate_id,
       -- A message of somebody else's may have names that are too long for the index by version.
       case when octet_length(aggregate_type) <= 255 and octet_length(aggregate_id) <= 512 then aggregate_version end, occurred_at
  from gone order by seq
    -- Its row may still wait to be swept away.
    on conflict (consumer, message_id) do update
       set state = 'new', seq = default, window_over = false, claimed_by = null, due_at = clock_timestamp(), attempts = 0,
           claims = 0, payload = excluded.payload,
           last_error = excluded.last_error, history = excluded.history
     where m.state = 'done'
