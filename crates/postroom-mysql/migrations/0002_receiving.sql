-- The receiving end: what makes a repeated delivery harmless, and keeps messages that wait to be handled.

create table if not exists postroom_inbox (
    -- One character longer than what is let in, as in the outbox.
    consumer     varchar(256) not null,
    message_id   char(36)     character set ascii collate ascii_bin not null,
    processed_at datetime(6)  not null default (utc_timestamp(6)),
    primary key (consumer, message_id),
    key postroom_inbox_age (processed_at),
    constraint postroom_inbox_consumer_has_1_to_255_bytes check (octet_length(consumer) between 1 and 255),
    constraint postroom_inbox_message_id_is_a_uuid check (message_id regexp '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$')
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- Messages that a consumer took charge of and that wait here: 'ready' from due_at on when no other of its key is before it, 'claimed' until due_at,
-- 'early' for an earlier version until due_at. Their ids are in postroom_inbox.
create table if not exists postroom_inbox_messages (
    seq               bigint       not null auto_increment primary key,
    consumer          varchar(255) not null,
    id                char(36)     character set ascii collate ascii_bin not null,
    state             varchar(16)  not null check (state in ('ready', 'claimed', 'early')),
    due_at            datetime(6)  not null,
    waits_since       datetime(6)  not null,
    received_at       datetime(6)  not null default (utc_timestamp(6)),
    ordering_key      varchar(512),
    claim             bigint       not null default 0,
    claims            int          not null default 0,
    claimed_by        varchar(512),
    window_over       tinyint      not null default 0,
    attempts          int          not null default 0,
    last_error        longtext,
    history           longtext     not null default ('[]'),
    topic             varchar(255) not null,
    type              varchar(255) not null,
    payload           longblob     not null,
    `key`             varchar(512),
    routing_key       varchar(255),
    content_type      varchar(255) not null,
    headers           longtext,
    tenant_id         varchar(512),
    aggregate_type    varchar(255),
    aggregate_id      varchar(512),
    aggregate_version bigint,
    occurred_at       datetime(6),
    unique key postroom_inbox_messages_id (consumer, id),
    key postroom_inbox_messages_due (consumer, due_at, seq),
    -- The first 200 characters of keys are enough to find them.
    key postroom_inbox_messages_key (consumer, ordering_key(200), seq),
    key postroom_inbox_messages_aggregate (consumer, aggregate_id(200), aggregate_version)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- What cannot be handled, or not even be kept among what waits: so nothing here has a limit of its own.
create table if not exists postroom_dead_consume (
    consumer          varchar(255) not null,
    id                char(36)     character set ascii collate ascii_bin not null,
    seq               bigint       not null,
    attempts          int          not null,
    cause             varchar(16)  not null check (cause in ('exhausted', 'permanent', 'poison')),
    error             longtext     not null,
    history           longtext     not null default ('[]'),
    died_at           datetime(6)  not null default (utc_timestamp(6)),
    ordering_key      varchar(512),
    topic             longtext     not null,
    type              longtext     not null,
    payload           longblob     not null,
    `key`             longtext,
    routing_key       longtext,
    content_type      longtext     not null,
    headers           longtext,
    tenant_id         longtext,
    aggregate_type    longtext,
    aggregate_id      longtext,
    aggregate_version bigint,
    occurred_at       datetime(6),
    primary key (consumer, id),
    key postroom_dead_consume_seq (consumer, seq)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- The version that was last handled; null: none yet, and somebody is about to.
create table if not exists postroom_inbox_versions (
    consumer       varchar(255) not null,
    aggregate      char(64)     character set ascii collate ascii_bin not null, -- SHA-256 of type and id: both are too long for a key
    aggregate_type varchar(255) not null,
    aggregate_id   varchar(512) not null,
    version        bigint,
    primary key (consumer, aggregate)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- Which process fills the inbox of a consumer: one at a time. `owner` is null when it was given back.
create table if not exists postroom_inbox_fillers (
    consumer     varchar(255) not null primary key,
    owner        varchar(512),
    epoch        bigint       not null,
    lease_us     bigint       not null check (lease_us > 0),
    expires_at   datetime(6)  not null,
    renewals     bigint       not null default 0,
    source       longtext,
    source_down_since datetime(6),
    source_error longtext
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- The tenure alone, in a row that renewals do not touch: transactions that keep messages hold it until they end, and only a takeover waits for them.
create table if not exists postroom_inbox_tenures (
    consumer varchar(255) not null primary key,
    epoch    bigint       not null
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- Locked by whoever takes messages of a consumer; and when waits were looked at last.
create table if not exists postroom_inbox_clocks (
    consumer  varchar(255) not null primary key,
    looked_at datetime(6)
) engine = InnoDB default character set utf8mb4 collate {collation}
