-- Outbox, routes, lanes, and what waits or is dead. Statements are separated by lines of four hyphens; all of a migration are one transaction.
-- {lanes} is the number of lanes. {text} is a collation that tells letters apart; {bytes X} is how many bytes X has in UTF-8,
-- {hash X} what it is found by, and {unicode X} whether it is text.
--
-- SQL Server compares texts without their trailing spaces, also in keys. Where two of them must not be taken for one, there is a hash of the text, or
-- a check that it ends with none.

create table postroom_settings (
    only_row              tinyint  not null default 1 constraint postroom_settings_pk primary key check (only_row = 1),
    lanes                 smallint not null,
    -- The oldest program that can work with the schema, by the number of the newest migration that it knows.
    oldest_program        int      not null,
    -- Names this outbox, so that an archive can hold several.
    outbox_id             uniqueidentifier not null default newid(),
    -- What is forgotten of an inbox is at least so old: a message that comes again later has its effect twice.
    redelivery_horizon_us bigint   not null default 1209600000000 check (redelivery_horizon_us > 0),
    -- Once a message of this outbox was archived, none is removed without that; and how many segments were ended.
    archives              tinyint  not null default 0,
    archived_segments     bigint   not null default 0
)
----
insert into postroom_settings (only_row, lanes, oldest_program) values (1, {lanes}, 1)
----
-- seq says which transaction of two with the same key was first; it does not say which transaction was committed first, so nobody reads on from a
-- seq. place does: a relay gives it to a row when it sees it, and whoever reads a lane in the order of places passes nothing by.
--
-- Texts are one character longer than what is let in: a session without ansi_warnings cuts a text off at the length of its column, and what
-- was cut off is refused like what is too long. There is no trigger, so that writers may use `output inserted.id`.
create table postroom_outbox (
    seq               bigint            identity not null constraint postroom_outbox_pk primary key,
    place             bigint,
    lane              as {lane_of} persisted not null,
    bytes             as {size_of} persisted not null,
    id                uniqueidentifier  not null default {new_id},
    topic             nvarchar(256)     collate {text} not null,
    type              nvarchar(256)     collate {text} not null,
    payload           varbinary(max)    not null,
    [key]             nvarchar(513)     collate {text},
    routing_key       nvarchar(256)     collate {text},
    content_type      nvarchar(256)     collate {text} not null default 'application/octet-stream',
    headers           nvarchar(max)     collate {text},
    tenant_id         nvarchar(513)     collate {text},
    aggregate_type    nvarchar(256)     collate {text},
    aggregate_id      nvarchar(513)     collate {text},
    aggregate_version bigint,
    occurred_at       datetime2(6)      not null default sysutcdatetime(),
    visible_at        datetime2(6),
    constraint postroom_outbox_id unique (id),
    constraint postroom_outbox_place_is_given_by_relays check (place is null or convert(nvarchar(8), session_context(N'postroom')) = N'1'),
    -- A half of a character of two halves, which is no text anywhere else.
    constraint postroom_outbox_topic_is_unicode check ({unicode topic}),
    constraint postroom_outbox_type_is_unicode check ({unicode type}),
    constraint postroom_outbox_key_is_unicode check ({unicode [key]}),
    constraint postroom_outbox_routing_key_is_unicode check ({unicode routing_key}),
    constraint postroom_outbox_content_type_is_unicode check ({unicode content_type}),
    constraint postroom_outbox_headers_is_unicode check ({unicode headers}),
    constraint postroom_outbox_tenant_id_is_unicode check ({unicode tenant_id}),
    constraint postroom_outbox_aggregate_type_is_unicode check ({unicode aggregate_type}),
    constraint postroom_outbox_aggregate_id_is_unicode check ({unicode aggregate_id}),
    constraint postroom_outbox_topic_has_1_to_255_bytes check ({bytes topic} between 1 and 255),
    constraint postroom_outbox_type_has_1_to_255_bytes check ({bytes type} between 1 and 255),
    constraint postroom_outbox_payload_has_at_most_1048576_bytes check (datalength(payload) <= 1048576),
    constraint postroom_outbox_key_has_1_to_512_bytes check ({bytes [key]} between 1 and 512),
    constraint postroom_outbox_routing_key_has_at_most_255_bytes check ({bytes routing_key} <= 255),
    constraint postroom_outbox_content_type_has_1_to_255_bytes check ({bytes content_type} between 1 and 255),
    constraint postroom_outbox_headers_are_an_object check ({object headers}),
    constraint postroom_outbox_headers_have_at_most_65536_bytes check ({bytes headers} <= 65536),
    constraint postroom_outbox_tenant_id_has_at_most_512_bytes check ({bytes tenant_id} <= 512),
    constraint postroom_outbox_aggregate_type_has_at_most_255_bytes check ({bytes aggregate_type} <= 255),
    constraint postroom_outbox_aggregate_id_has_1_to_512_bytes check ({bytes aggregate_id} between 1 and 512)
)
----
create index postroom_outbox_fresh on postroom_outbox (lane, place) with (allow_page_locks = off)
----
-- A large transaction must not lock everybody out.
alter table postroom_outbox set (lock_escalation = disable)
----
-- The next place of each lane. Whoever gives places locks the row, so that a place is seen after all before it.
create table postroom_places (
    lane       smallint not null constraint postroom_places_pk primary key,
    next_place bigint   not null
)
----
insert into postroom_places (lane, next_place)
select n.lane, 1 from openjson(N'{lane_list}') with (lane smallint '$') n
----
create table postroom_routes (
    name     nvarchar(200) collate {text} not null constraint postroom_routes_pk primary key check (name not like N'% '),
    topics   nvarchar(max) collate {text} not null,
    ordering nvarchar(16)  check (ordering in ('key', 'pipelined', 'none')),
    on_dead  nvarchar(16)  check (on_dead in ('skip', 'block')),
    revision bigint        not null default 1
)
----
create table postroom_route_revisions (
    route    nvarchar(200) collate {text} not null,
    revision bigint        not null,
    topics   nvarchar(max) collate {text} not null,
    ordering nvarchar(16),
    on_dead  nvarchar(16),
    set_by   nvarchar(512) collate {text} not null,
    set_at   datetime2(6)  not null default sysutcdatetime(),
    constraint postroom_route_revisions_pk primary key (route, revision)
)
----
create table postroom_lanes (
    route      nvarchar(200) collate {text} not null,
    lane       smallint      not null,
    owner      nvarchar(512) collate {text},
    epoch      bigint        not null default 0,
    expires_at datetime2(6),
    position   bigint        not null default 0,
    settled_at datetime2(6),
    constraint postroom_lanes_pk primary key (route, lane)
)
----
alter table postroom_lanes set (lock_escalation = disable)
----
create table postroom_relays (
    route           nvarchar(200) collate {text} not null,
    owner           nvarchar(200) collate {text} not null,
    seen_at         datetime2(6)  not null,
    expires_at      datetime2(6)  not null,
    sink            nvarchar(max) collate {text},
    sink_blocked    tinyint       not null default 0,
    sink_down_since datetime2(6),
    sink_error      nvarchar(max) collate {text},
    constraint postroom_relays_pk primary key (route, owner)
)
----
-- Copies of messages that wait: 'retry' from due_at on, 'scheduled' until due_at, 'queued' behind others of their key, without a time.
create table postroom_parked (
    route             nvarchar(200) collate {text} not null,
    seq               bigint        not null,
    lane              smallint      not null,
    ordering_key      nvarchar(512) collate {text},
    key_hash          as {hash ordering_key} persisted,
    state             nvarchar(16)  not null check (state in ('retry', 'scheduled', 'queued')),
    attempts          int           not null default 0,
    due_at            datetime2(6),
    waits_since       datetime2(6),
    last_error        nvarchar(max) collate {text},
    history           nvarchar(max) collate {text} not null,
    bytes             int           not null,
    id                uniqueidentifier not null,
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
    occurred_at       datetime2(6)  not null,
    -- With the id, since a seq may be another message's after a restore.
    constraint postroom_parked_pk primary key (route, seq, id)
)
----
create index postroom_parked_due on postroom_parked (route, due_at)
----
create index postroom_parked_state on postroom_parked (route, state, due_at)
----
create index postroom_parked_key on postroom_parked (route, key_hash, seq)
----
alter table postroom_parked set (lock_escalation = disable)
----
create table postroom_dead_letters (
    route             nvarchar(200) collate {text} not null,
    seq               bigint        not null,
    lane              smallint      not null,
    attempts          int           not null,
    cause             nvarchar(16)  not null check (cause in ('exhausted', 'permanent', 'poison')),
    error             nvarchar(max) collate {text} not null,
    history           nvarchar(max) collate {text} not null,
    died_at           datetime2(6)  not null default sysutcdatetime(),
    bytes             int           not null,
    id                uniqueidentifier not null,
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
    occurred_at       datetime2(6)  not null,
    constraint postroom_dead_letters_pk primary key (route, seq, id)
)
----
create table postroom_blocked_keys (
    route        nvarchar(200) collate {text} not null,
    seq          bigint        not null,
    ordering_key nvarchar(512) collate {text} not null,
    key_hash     as {hash ordering_key} persisted not null,
    blocked_at   datetime2(6)  not null default sysutcdatetime(),
    reason       nvarchar(max) collate {text} not null,
    constraint postroom_blocked_keys_pk primary key (route, key_hash, seq)
)
