-- What an application needs that writes messages: no reading, no sequence, none of the columns xid, seq and lane.
grant usage on schema postroom to app_writer;
grant execute on all functions in schema postroom to app_writer;
revoke execute on function postroom.mend() from app_writer;
grant insert (id, topic, type, payload, key, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
              aggregate_version, occurred_at, visible_at) on postroom.outbox to app_writer;
-- One that also receives with an inbox in this database:
grant insert, select on postroom.inbox to app_writer;
