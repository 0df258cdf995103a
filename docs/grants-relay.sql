-- What a relay needs: it reads the outbox and writes progress, and sees no table of the application. One that fills inboxes needs
-- grants-consumer.sql too.
grant usage on schema postroom to postroom_relay;
-- It carries out operations that others began. While one runs that discards dead letters of a route, this role is trusted to keep to its filter.
grant execute on function
    postroom.checkpoint(),
    postroom.register_route(text, text[], text, text, text),
    postroom.change_route(text, text[], text, text, text),
    postroom.at_home(),
    postroom.missing_indexes(),
    postroom.positions_are_foreign(),
    postroom.failure_noted(jsonb, integer, text),
    postroom.refresh_statistics(),
    postroom.retain_outbox(smallint, bigint, text[], interval[], interval, integer),
    postroom.outbox_expired(smallint, bigint, text[], interval[], interval, integer),
    postroom.archive_begin(smallint[], bigint[], interval),
    postroom.archive_take(interval),
    postroom.archive_end(uuid),
    postroom.archive_forget(integer),
    postroom.retain_dead(interval, integer),
    postroom.retain_inbox(interval, integer),
    postroom.retain_audit(interval, integer),
    postroom.note_sizes(),
    postroom.note_reconciled(text, bigint, bigint, bigint, jsonb),
    postroom.operations_due(integer),
    postroom.operation_step(uuid, bigint[], bigint, bigint, boolean),
    postroom.mend() to postroom_relay;
grant select on postroom.outbox, postroom.settings, postroom.migrations, postroom.outbox_seq_seq, postroom.archive_segments to postroom_relay;
grant select, insert, update on postroom.routes, postroom.route_revisions, postroom.lanes to postroom_relay;
grant select, insert, update, delete on postroom.parked, postroom.relays, postroom.suspects to postroom_relay;
grant select, insert on postroom.dead_letters, postroom.blocked_keys to postroom_relay;
-- What `[admin]` needs for the metrics about the store: how much waits at the receiving end, without payloads, and how large tables are.
grant select on postroom.sizes, postroom.inbox, postroom.inbox_fillers, postroom.operation_watch, postroom.reconciliations to postroom_relay;
grant select (id, kind, route) on postroom.operations to postroom_relay;
grant select (consumer, seq, message_id, type, topic, ordering_key, died_at, cause, error, tenant_id, aggregate_id)
    on postroom.dead_consume to postroom_relay;
grant select (consumer, message_id, state, attempts, received_at, due_at, last_error) on postroom.inbox_messages to postroom_relay;
