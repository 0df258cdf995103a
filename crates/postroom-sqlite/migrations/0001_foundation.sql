-- SQLite has one writer at a time and a seq is taken under its lock, so the order of seqs is the order of commits: the
-- position of a route is one seq, and there are no late rows. One lane.
create table postroom_outbox (
    seq               integer primary key autoincrement,
    id                text    not null unique
        check (length(replace(id, '-', '')) = 32 and id not glob '*[^0-9a-fA-F-]*'),
    topic             text    not null check (length(cast(topic as blob)) between 1 and 255),
    type              text    not null check (length(cast(type as blob)) between 1 and 255),
    payload           blob    not null
        check (typeof(payload) in ('blob', 'text') and length(cast(payload as blob)) <= 1048576),
    key               text    check (length(cast(key as blob)) between 1 and 512),
    routing_key       text    check (length(cast(routing_key as blob)) <= 255),
    content_type      text    not null default 'application/octet-stream',
    headers           text    check (headers is null or json_type(headers) = 'object'),
    tenant_id         text    check (length(cast(tenant_id as blob)) <= 512),
    aggregate_type    text    check (length(cast(aggregate_type as blob)) <= 255),
    aggregate_id      text    check (length(cast(aggregate_id as blob)) between 1 and 512),
    aggregate_version integer check (typeof(aggregate_version) in ('integer', 'null')),
    occurred_ms       integer not null default (cast(unixepoch('subsec') * 1000 as integer))
        check (typeof(occurred_ms) = 'integer'),
    visible_ms        integer check (typeof(visible_ms) in ('integer', 'null'))
);

create table postroom_lanes (
    route        text    not null,
    lane         integer not null,
    owner        text,
    epoch        integer not null default 0,
    expires_ms   integer,
    position_seq integer not null default 0,
    primary key (route, lane)
) without rowid;

create table postroom_routes (name text primary key, topics text not null) without rowid;

create table postroom_parked (
    route             text    not null,
    seq               integer not null,
    lane              integer not null,
    ordering_key      text,
    state             text    not null check (state in ('retry', 'scheduled', 'queued')),
    attempts          integer not null default 0,
    due_ms            integer not null,
    last_error        text,
    id                text    not null,
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
    occurred_ms       integer not null,
    primary key (route, seq)
);
create index postroom_parked_due on postroom_parked (route, due_ms) where state <> 'queued';
create index postroom_parked_key on postroom_parked (route, ordering_key, seq) where state <> 'scheduled';

create table postroom_dead_letters (
    route             text    not null,
    seq               integer not null,
    lane              integer not null,
    attempts          integer not null,
    cause             text    not null,
    error             text    not null,
    died_ms           integer not null default (cast(unixepoch('subsec') * 1000 as integer)),
    id                text    not null,
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
    occurred_ms       integer not null,
    primary key (route, seq)
);

create table postroom_inbox (
    consumer     text    not null check (length(cast(consumer as blob)) between 1 and 255),
    message_id   text    not null,
    processed_ms integer not null default (cast(unixepoch('subsec') * 1000 as integer)),
    primary key (consumer, message_id)
) without rowid;
