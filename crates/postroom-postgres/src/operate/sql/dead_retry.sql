-- Moves dead letters back to the parked ones, in one statement: behind what waits in their key by seq, due at once, with all
-- their attempts before them. $1 routes, $2 seqs; parallel arrays.
with gone as (
    delete from postroom.dead_letters d
     using unnest($1::text[], $2::bigint[]) as c (route, seq)
     where d.route = c.route and d.seq = c.seq
    returning d.*
),
freed as (
    delete from postroom.blocked_keys b
     using unnest($1::text[], $2::bigint[]) as c (route, seq)
     where b.route = c.route and b.seq = c.seq
)
insert into postroom.parked (route, seq, lane, ordering_key, state, attempts, due_at, waits_since, last_error, history, id, topic, type, payload,
                             key, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                             aggregate_version, occurred_at)
select route, seq, lane, coalesce(key, aggregate_id), case when coalesce(key, aggregate_id) is null then 'retry' else 'queued' end,
       0, clock_timestamp(), clock_timestamp(), error, history, id, topic, type, payload, key, routing_key, content_type, headers, tenant_id,
       aggregate_type, aggregate_id, aggregate_version, occurred_at
  from gone
    on conflict (route, seq) do nothing
returning id
