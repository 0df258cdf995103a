-- What a person needs who runs `postroom status`, `why`, `dead`, `keys`, `routes` and `inbox prune`: they read everything, payloads
-- included. The commands write what they do to postroom.audit, which this role cannot change; it can remove rows of more than 30 days, and a
-- row says so. The role is trusted: with
-- SQL of its own it can do what the commands do without a row there (move positions, change routes, park or delete messages).
grant usage on schema postroom to app_operator;
grant execute on function
    postroom.change_route(text, text[], text, text, text),
    postroom.inbox_prune(interval, integer),
    postroom.forget_route(text, boolean, text, text),
    postroom.retain_outbox(smallint, bigint, text[], interval[], interval, integer),
    postroom.outbox_expired(smallint, bigint, text[], interval[], interval, integer),
    postroom.archive_begin(smallint[], bigint[], interval),
    postroom.archive_take(interval),
    postroom.archive_end(uuid),
    postroom.archive_forget(integer),
    postroom.archive_restore(bigint[], uuid[], text[], text[], bytea[], text[], text[], text[], text[], text[], text[], text[], bigint[], bigint[],
                             interval),
    postroom.note_reconciled(text, bigint, bigint, bigint, jsonb),
    postroom.retain_dead(interval, integer),
    postroom.retain_inbox(interval, integer),
    postroom.retain_audit(interval, integer),
    postroom.payload_as_json(bytea) to app_operator;
grant select on all tables in schema postroom to app_operator;
-- Who acted, by the database's own word, is not theirs to write.
revoke insert on postroom.audit from app_operator;
grant insert (actor, action, reason, filter, message_ids) on postroom.audit to app_operator;
grant insert, update on postroom.parked, postroom.route_revisions to app_operator;
-- Operations on many messages are begun and steered here; relays carry them out.
grant select on postroom.outbox_seq_seq to app_operator;
grant insert, update on postroom.operations to app_operator;
grant insert on postroom.dead_notes to app_operator;
grant update on postroom.routes, postroom.lanes to app_operator;
grant insert, delete on postroom.blocked_keys to app_operator;
grant delete on postroom.dead_letters, postroom.dead_consume, postroom.inbox to app_operator;
grant insert, update on postroom.inbox_messages to app_operator;
-- `postroom intake again` also needs update on the table whose rows are taken.
grant update on postroom.intakes to app_operator;
grant delete on postroom.intake_rows to app_operator;
