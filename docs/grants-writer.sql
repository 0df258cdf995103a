-- What an application needs that writes messages: no reading, no sequence, none of the columns xid, seq and lane.
grant usage on schema postroom to app_writer;
grant execute on function
    postroom.enqueue(text, text, bytea, text, jsonb, text, text, text, text, bigint, text, interval, uuid),
    postroom.enqueue(text, text, text, text, jsonb, text, text, text, text, bigint, text, interval, uuid),
    postroom.enqueue(text, text, jsonb, text, jsonb, text, text, text, text, bigint, text, interval, uuid),
    postroom.uuid_v7() to app_writer;
grant insert (id, topic, type, payload, key, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
              aggregate_version, occurred_at, visible_at) on postroom.outbox to app_writer;
