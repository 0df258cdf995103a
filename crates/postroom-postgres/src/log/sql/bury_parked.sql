-- Moves parked messages to the dead letters in one statement. $1 route, $2 seqs, $3 attempts, $4 causes, $5 errors.
with gone as (
    delete from postroom.parked q
     using unnest($2::bigint[], $3::int[], $4::text[], $5::text[]) as p (seq, attempts, cause, error)
     where q.route = $1 and q.seq = p.seq
    returning q.*, p.attempts as burned, p.cause, p.error
)
insert into postroom.dead_letters (route, seq, lane, attempts, cause, error, history, id, topic, type, payload, key, routing_key,
                                   content_type, headers, tenant_id, aggregate_type, aggregate_id, aggregate_version,
                                   occurred_at)
select route, seq, lane, burned, cause, error, postroom.failure_noted(history, burned, error), id, topic, type, payload, key, routing_key, content_type, headers, tenant_id,
       aggregate_type, aggregate_id, aggregate_version, occurred_at
  from gone
    on conflict (route, seq) do nothing
