-- Keeps a message as a dead one that cannot be kept among those that wait. It has no seq of theirs, so it gets a negative one
-- of its own. A key that is too long for the indexes there is not repeated as ordering_key. $1 consumer, $2 error, $3 bytes
-- that an ordering key may have; $4 to $16 the columns of the message.
insert into postroom.dead_consume
       (consumer, message_id, seq, attempts, cause, error, ordering_key, topic, type, payload, key, routing_key, content_type,
        headers, tenant_id, aggregate_type, aggregate_id, aggregate_version, occurred_at)
select $1, $4, -pg_catalog.nextval('postroom.inbox_claims'::regclass), 0, 'permanent', $2,
       case when octet_length(coalesce($8, $14)) <= $3 then coalesce($8, $14) end,
       $5, $6, $7, $8, $9, $10, $11::text::json, $12, $13, $14, $15,
       case when $16::bigint is not null then to_timestamp($16::bigint::float8 / 1e6::float8) end
    on conflict (consumer, message_id) do nothing
