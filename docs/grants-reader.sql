-- What a dashboard or a colleague needs who only looks: `postroom status`, `why`, `keys list` and `routes list`. No payloads and no
-- headers, so no `dead list` and `dead show`.
grant usage on schema postroom to app_reader;
grant select on postroom.migrations, postroom.settings, postroom.routes, postroom.route_revisions, postroom.lanes, postroom.relays,
                postroom.blocked_keys, postroom.audit, postroom.inbox, postroom.inbox_fillers, postroom.sizes,
                postroom.outbox_seq_seq, postroom.operations, postroom.operation_watch, postroom.operation_tallies, postroom.dead_notes, postroom.reconciliations, postroom.intake_rows, postroom.archive_restored to app_reader;
grant select (xid, seq, lane, occurred_at, visible_at, id, topic, type, key, tenant_id, aggregate_type, aggregate_id,
              aggregate_version) on postroom.outbox to app_reader;
grant select (route, seq, lane, ordering_key, state, attempts, due_at, parked_at, last_error, history, id, topic, type, key,
              tenant_id, aggregate_type, aggregate_id, aggregate_version, occurred_at) on postroom.parked to app_reader;
grant select (route, seq, lane, attempts, cause, error, history, died_at, id, topic, type, key, tenant_id, aggregate_type,
              aggregate_id, aggregate_version, occurred_at) on postroom.dead_letters to app_reader;
grant select (consumer, seq, attempts, cause, error, history, died_at, message_id, topic, type, key, ordering_key, tenant_id,
              aggregate_type, aggregate_id, aggregate_version, occurred_at) on postroom.dead_consume to app_reader;
grant select (consumer, message_id, seq, state, due_at, received_at, claims, claimed_by, attempts, last_error, history, topic, type, key, ordering_key,
              tenant_id, aggregate_type, aggregate_id, aggregate_version, occurred_at) on postroom.inbox_messages to app_reader;
