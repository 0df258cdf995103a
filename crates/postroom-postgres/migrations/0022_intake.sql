-- Rows of tables that already exist are taken into the outbox. What must be known of a row that its own table has no room for stands here.

alter table postroom.audit drop constraint audit_action_check;
alter table postroom.audit add constraint audit_action_check check (action in
    ('dead.retry', 'dead.discard', 'dead.expire', 'dead.note', 'key.park', 'key.unpark', 'key.skip', 'inbox.retry', 'inbox.discard',
     'inbox.expire', 'inbox.prune', 'audit.expire', 'route.set', 'route.forget', 'replay', 'operation.begin', 'operation.pause',
     'operation.resume', 'operation.cancel', 'archive.restore', 'payload.read', 'intake.again'));

-- Whoever has locked the row takes: one process at a time, so that rows enter the outbox in their order.
create table postroom.intakes (
    name text primary key check (octet_length(name) between 1 and 255)
);

create table postroom.intake_rows (
    intake  text        not null,
    row_key text        not null, -- what identifies the row, as text
    place   bigint      not null generated always as identity,
    id      uuid,                 -- of its message
    -- taken: its message is in the outbox; dead: and has died; discarded: and an operator discarded it; refused: no message can be made of
    -- the row; unclear: whether its message was sent is not known; unmarked: it was sent, and the row refuses to be marked.
    state   text        not null check (state in ('taken', 'dead', 'discarded', 'refused', 'unclear', 'unmarked')),
    error   text,
    at      timestamptz not null default clock_timestamp(),
    primary key (intake, row_key)
);
create index intake_rows_open on postroom.intake_rows (intake, place) where state in ('taken', 'dead');
create index intake_rows_aside on postroom.intake_rows (intake, at) where state in ('refused', 'unclear', 'unmarked');
