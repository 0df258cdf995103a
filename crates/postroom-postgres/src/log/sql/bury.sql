-- Copies messages of the outbox into the dead letters. Repeating it changes nothing.
-- $1 route, $2 seqs, $3 lanes, $4 attempts, $5 causes, $6 errors, $7 ids.
insert into postroom.dead_letters (route, seq, lane, attempts, cause, error, history, id, topic, type, payload, key, routing_key,
                                   content_type, headers, tenant_id, aggregate_type, aggregate_id, aggregate_version,
                                   occurred_at)
select $1, o.seq, o.lane, p.attempts, p.cause, p.error,
       postroom.failure_noted('[]', p.attempts, p.error), o.id, o.topic, o.type, o.payload, o.key, o.routing_key,
       o.content_type, o.headers, o.tenant_id, o.aggregate_type, o.aggregate_id, o.aggregate_version, o.occurred_at
  from unnest($2::bigint[], $3::smallint[], $4::int[], $5::text[], $6::text[], $7::uuid[])
           as p (seq, lane, attempts, cause, error, id)
  join postroom.outbox o on o.lane = p.lane and o.seq = p.seq and o.id = p.id
    on conflict (route, seq) do nothing
