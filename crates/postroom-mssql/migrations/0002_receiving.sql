-- The receiving end: what makes a repeated delivery harmless, and keeps messages that wait to be handled.

create table postroom_inbox (
    -- One character longer than what is let in, as in the outbox.
    consumer     nvarchar(256) collate {text} not null,
    message_id   uniqueidentifier not null,
    processed_at datetime2(6)  not null default sysutcdatetime(),
    constraint postroom_inbox_pk primary key (consumer, message_id),
    constraint postroom_inbox_consumer_has_1_to_255_bytes check ({bytes consumer} between 1 and 255),
    -- 'totals' and 'totals ' would be one consumer.
    constraint postroom_inbox_consumer_ends_with_no_space check (consumer not like N'% ')
)
----
create index postroom_inbox_age on postroom_inbox (processed_at)
----
alter table postroom_inbox set (lock_escalation = disable)
----
-- Messages that a consumer took charge of and that wait here: 'ready' from due_at on when no other of its key is before it, 'claimed' until due_at,
-- 'early' for an earlier version until due_at. Their ids are in postroom_inbox. What is put off waits behind another one of its key, which makes it
-- due when it leaves.
create table postroom_inbox_messages (
    seq               bigint        identity not null constraint postroom_inbox_messages_pk primary key,
    consumer          nvarchar(255) collate {text} not null,
    id                uniqueidentifier not null,
    state             nvarchar(16)  not null check (state in ('ready', 'claimed', 'early')),
    put_off           tinyint       not null default 0,
    due_at            datetime2(6)  not null,
    waits_since       datetime2(6)  not null,
    received_at       datetime2(6)  not null default sysutcdatetime(),
    ordering_key      nvarchar(512) collate {text},
    key_hash          as {hash ordering_key} persisted,
    claim             bigint        not null default 0,
    claims            int           not null default 0,
    claimed_by        nvarchar(512) collate {text},
    window_over       tinyint       not null default 0,
    attempts          int           not null default 0,
    last_error        nvarchar(max) collate {text},
    history           nvarchar(max) collate {text} not null default '[]',
    topic             nvarchar(255) collate {text} not null,
    type              nvarchar(255) collate {text} not null,
    payload           varbinary(max) not null,
    [key]             nvarchar(512) collate {text},
    routing_key       nvarchar(255) collate {text},
    content_type      nvarchar(255) collate {text} not null,
    headers           nvarchar(max) collate {text},
    tenant_id         nvarchar(512) collate {text},
    aggregate_type    nvarchar(255) collate {text},
    aggregate_id      nvarchar(512) collate {text},
    aggregate_version bigint,
    occurred_at       datetime2(6),
    aggregate_hash    as {hash aggregate_id} persisted,
    constraint postroom_inbox_messages_id unique (consumer, id)
)
----
create index postroom_inbox_messages_due on postroom_inbox_messages (consumer, put_off, due_at, seq) with (allow_page_locks = off)
----
create index postroom_inbox_messages_queue on postroom_inbox_messages (consumer, key_hash, seq) with (allow_page_locks = off)
----
create index postroom_inbox_messages_state on postroom_inbox_messages (consumer, state, key_hash)
----
create index postroom_inbox_messages_aggregate on postroom_inbox_messages (consumer, aggregate_hash, aggregate_version)
----
alter table postroom_inbox_messages set (lock_escalation = disable)
----
-- What cannot be handled, or not even be kept among what waits: so nothing here has a limit of its own.
create table postroom_dead_consume (
    consumer          nvarchar(255) collate {text} not null,
    id                uniqueidentifier not null,
    seq               bigint        not null,
    attempts          int           not null,
    cause             nvarchar(16)  not null check (cause in ('exhausted', 'permanent', 'poison')),
    error             nvarchar(max) collate {text} not null,
    history           nvarchar(max) collate {text} not null default '[]',
    died_at           datetime2(6)  not null default sysutcdatetime(),
    ordering_key      nvarchar(512) collate {text},
    topic             nvarchar(max) collate {text} not null,
    type              nvarchar(max) collate {text} not null,
    payload           varbinary(max) not null,
    [key]             nvarchar(max) collate {text},
    routing_key       nvarchar(max) collate {text},
    content_type      nvarchar(max) collate {text} not null,
    headers           nvarchar(max) collate {text},
    tenant_id         nvarchar(max) collate {text},
    aggregate_type    nvarchar(max) collate {text},
    aggregate_id      nvarchar(max) collate {text},
    aggregate_version bigint,
    occurred_at       datetime2(6),
    constraint postroom_dead_consume_pk primary key (consumer, id)
)
----
create index postroom_dead_consume_seq on postroom_dead_consume (consumer, seq)
----
-- The version that was last handled; null: none yet, and somebody is about to.
create table postroom_inbox_versions (
    consumer       nvarchar(255) collate {text} not null,
    aggregate      nchar(64)     not null, -- SHA-256 of type and id: both are too long for a key
    aggregate_type nvarchar(255) collate {text} not null,
    aggregate_id   nvarchar(512) collate {text} not null,
    version        bigint,
    constraint postroom_inbox_versions_pk primary key (consumer, aggregate)
)
----
-- Which process fills the inbox of a consumer: one at a time. `owner` is null when it was given back.
create table postroom_inbox_fillers (
    consumer          nvarchar(255) collate {text} not null constraint postroom_inbox_fillers_pk primary key,
    owner             nvarchar(512) collate {text},
    epoch             bigint        not null,
    lease_us          bigint        not null check (lease_us > 0),
    expires_at        datetime2(6)  not null,
    renewals          bigint        not null default 0,
    source            nvarchar(max) collate {text},
    source_down_since datetime2(6),
    source_error      nvarchar(max) collate {text}
)
----
-- The tenure alone, in a row that renewals do not touch: transactions that keep messages hold it until they end, and only a takeover waits for them.
create table postroom_inbox_tenures (
    consumer nvarchar(255) collate {text} not null constraint postroom_inbox_tenures_pk primary key,
    epoch    bigint        not null
)
----
-- Locked by whoever takes messages of a consumer; and when waits were looked at last.
create table postroom_inbox_clocks (
    consumer  nvarchar(255) collate {text} not null constraint postroom_inbox_clocks_pk primary key,
    looked_at datetime2(6)
)
