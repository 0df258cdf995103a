-- One message with all its columns, from the first table that has it. $1 id.
select 'outbox', o.id, o.topic, o.type, o.key, o.routing_key, o.content_type, o.headers::text, o.tenant_id, o.aggregate_type,
       o.aggregate_id, o.aggregate_version, extract(epoch from clock_timestamp() - o.occurred_at)::float8, o.payload
  from postroom.outbox o where o.id = $1
union all
select 'dead_letters', d.id, d.topic, d.type, d.key, d.routing_key, d.content_type, d.headers::text, d.tenant_id, d.aggregate_type,
       d.aggregate_id, d.aggregate_version, extract(epoch from clock_timestamp() - d.occurred_at)::float8, d.payload
  from postroom.dead_letters d where d.id = $1
union all
select 'dead_consume', d.message_id, d.topic, d.type, d.key, d.routing_key, d.content_type, d.headers::text, d.tenant_id,
       d.aggregate_type, d.aggregate_id, d.aggregate_version, extract(epoch from clock_timestamp() - d.occurred_at)::float8, d.payload
  from postroom.dead_consume d where d.message_id = $1
union all
select 'parked', p.id, p.topic, p.type, p.key, p.routing_key, p.content_type, p.headers::text, p.tenant_id, p.aggregate_type,
       p.aggregate_id, p.aggregate_version, extract(epoch from clock_timestamp() - p.occurred_at)::float8, p.payload
  from postroom.parked p where p.id = $1
union all
select 'inbox_messages', m.message_id, m.topic, m.type, m.key, m.routing_key, m.content_type, m.headers::text, m.tenant_id,
       m.aggregate_type, m.aggregate_id, m.aggregate_version, extract(epoch from clock_timestamp() - m.occurred_at)::float8, m.payload
  from postroom.inbox_messages m where m.message_id = $1 and m.state <> 'done'
 limit 1
