-- The receiving side: messages that wait to be handled, those that cannot be, and the versions that were handled.

create index postroom_inbox_age on postroom_inbox (processed_ms);

-- The longest time after which a message may be delivered again. The inbox is not pruned below it.
create table postroom_settings (
    only_row              integer primary key default 1 check (only_row = 1),
    redelivery_horizon_ms integer not null default 1209600000 check (redelivery_horizon_ms > 0)
);
insert into postroom_settings default values;

-- Messages that a consumer took charge of and that wait here: 'ready' from due_ms on when no other of its key is before it,
-- 'claimed' until due_ms, 'early' for an earlier version until due_ms. Their ids are in postroom_inbox.
create table postroom_inbox_messages (
    seq               integer primary key autoincrement,
    consumer          text    not null,
    id                text    not null,
    state             text    not null check (state in ('ready', 'claimed', 'early')),
    due_ms            integer not null,
    ordering_key      text,
    claim             integer not null default 0,
    claims            integer not null default 0,
    claimed_by        text,
    window_over       integer not null default 0,
    attempts          integer not null default 0,
    last_error        text,
    history           text    not null default '[]',
    topic             text    not null,
    type              text    not null,
    payload           blob    not null,
    key               text,
    routing_key       text,
    content_type      text    not null,
    headers           text,
    tenant_id         text,
    aggregate_type    text,
    aggregate_id      text,
    aggregate_version integer,
    occurred_ms       integer,
    unique (consumer, id)
);
create index postroom_inbox_messages_due on postroom_inbox_messages (consumer, due_ms, seq);
create index postroom_inbox_messages_key on postroom_inbox_messages (consumer, ordering_key, seq);

create table postroom_dead_consume (
    consumer          text    not null,
    id                text    not null,
    seq               integer not null,
    attempts          integer not null,
    cause             text    not null check (cause in ('exhausted', 'permanent', 'poison')),
    error             text    not null,
    history           text    not null default '[]',
    died_ms           integer not null default (cast(unixepoch('subsec') * 1000 as integer)),
    ordering_key      text,
    topic             text    not null,
    type              text    not null,
    payload           blob    not null,
    key               text,
    routing_key       text,
    content_type      text    not null,
    headers           text,
    tenant_id         text,
    aggregate_type    text,
    aggregate_id      text,
    aggregate_version integer,
    occurred_ms       integer,
    primary key (consumer, id)
);

create table postroom_inbox_versions (
    consumer       text    not null,
    aggregate_type text    not null,
    aggregate_id   text    not null,
    version        integer not null,
    primary key (consumer, aggregate_type, aggregate_id)
) without rowid;

create table postroom_audit_4 (
    id          integer primary key autoincrement,
    at_ms       integer not null default (cast(unixepoch('subsec') * 1000 as integer)),
    actor       text    not null,
    action      text    not null
        check (action in ('dead.retry', 'dead.discard', 'key.park', 'key.unpark', 'key.skip', 'inbox.retry', 'inbox.discard',
                          'inbox.prune')),
    reason      text    not null check (reason <> ''),
    filter      text    not null,
    message_ids text    not null
);
insert into postroom_audit_4 select * from postroom_audit;
drop table postroom_audit;
alter table postroom_audit_4 rename to postroom_audit;
