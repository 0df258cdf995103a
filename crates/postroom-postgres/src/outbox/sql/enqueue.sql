-- One statement for all messages of a call, appended in their order. It runs in the writer's session, with whatever search_path that
-- has: every function and operator here is found in pg_catalog with exactly these types, or is named with its schema.
insert into postroom.outbox (id, topic, type, payload, key, routing_key, content_type, headers, tenant_id, aggregate_type,
                             aggregate_id, aggregate_version, occurred_at, visible_at)
select m.id, m.topic, m.type, m.payload, m.key, m.routing_key, m.content_type, m.headers::json, m.tenant_id,
       m.aggregate_type, m.aggregate_id, m.aggregate_version,
       coalesce(timestamptz 'epoch' + m.occurred_us::float8 * interval '1 microsecond', clock_timestamp()),
       case when m.delay_us > 0 then clock_timestamp() + m.delay_us::float8 * interval '1 microsecond' end
  from unnest($1::uuid[], $2::text[], $3::text[], $4::bytea[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
              $10::text[], $11::text[], $12::bigint[], $13::bigint[], $14::bigint[])
       with ordinality
       as m (id, topic, type, payload, key, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
             aggregate_version, occurred_us, delay_us, n)
 order by m.n
