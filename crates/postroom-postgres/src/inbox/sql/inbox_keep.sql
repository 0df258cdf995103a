-- Keeps messages in the store, in the order of the arrays. $1 consumer, $2 state, $3 seconds until due, $4 owner of the
-- claim; $5 to $17 one array a column. Returns the claims.
insert into postroom.inbox_messages
       (consumer, state, due_at, waits_since, claimed_by, claim, claims, message_id, topic, type, payload, key, routing_key, content_type,
        headers, tenant_id, aggregate_type, aggregate_id, aggregate_version, occurred_at, ordering_key)
select $1, $2, clock_timestamp() + $3::float8 * interval '1 second', case when $2 <> 'new' then clock_timestamp() end, $4,
       case when $2 = 'claimed' then pg_catalog.nextval('postroom.inbox_claims'::regclass) else 0 end, case when $2 = 'claimed' then 1 else 0 end,
       m.id, m.topic, m.type, m.payload, m.key, m.routing_key, m.content_type, m.headers::json, m.tenant_id,
       m.aggregate_type, m.aggregate_id, m.aggregate_version,
       case when m.occurred_us is not null then to_timestamp(m.occurred_us::float8 / 1e6::float8) end, coalesce(m.key, m.aggregate_id)
  from unnest($5::uuid[], $6::text[], $7::text[], $8::bytea[], $9::text[], $10::text[], $11::text[], $12::text[],
              $13::text[], $14::text[], $15::text[], $16::bigint[], $17::bigint[]) with ordinality
            as m (id, topic, type, payload, key, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                  aggregate_version, occurred_us, n)
 order by m.n
    on conflict (consumer, message_id) do nothing
returning claim
