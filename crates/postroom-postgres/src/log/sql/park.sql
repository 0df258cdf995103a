-- Copies messages from the outbox to the parked ones. Repeating it changes nothing.
-- $1 route, $2 seqs, $3 lanes, $4 states, $5 attempts, $6 waits in milliseconds, $7 errors, $9 ids; parallel arrays. $8 whether
-- the route keeps order: without it a message waits for no other of its key. The id tells a message from another one that got
-- the same seq after somebody set the sequence back.
insert into postroom.parked (route, seq, lane, ordering_key, state, attempts, due_at, waits_since, last_error, history, id, topic, type, payload,
                             key, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                             aggregate_version, occurred_at)
select $1, o.seq, o.lane, case when $8 then coalesce(o.key, o.aggregate_id) end, p.state, p.attempts,
       case p.state when 'scheduled' then coalesce(o.visible_at, clock_timestamp())
                    else clock_timestamp() + p.wait_ms * interval '1 millisecond' end,
       clock_timestamp(),
       p.error, case when p.error is null then '[]' else postroom.failure_noted('[]', p.attempts, p.error) end, o.id, o.topic, o.type, o.payload, o.key, o.routing_key, o.content_type, o.headers, o.tenant_id,
       o.aggregate_type, o.aggregate_id, o.aggregate_version, o.occurred_at
  from unnest($2::bigint[], $3::smallint[], $4::text[], $5::int[], $6::bigint[], $7::text[], $9::uuid[])
           as p (seq, lane, state, attempts, wait_ms, error, id)
  join postroom.outbox o on o.lane = p.lane and o.seq = p.seq and o.id = p.id
    on conflict (route, seq) do nothing
