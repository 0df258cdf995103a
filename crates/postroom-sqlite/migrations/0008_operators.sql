-- What operators see of relays and fillers, and tables that cannot hold what would stop a route.

-- The outbox once more, as a strict table: a blob as a topic is refused when it is written. Its defaults do without
-- unixepoch('subsec'), which SQLite has from 3.42 on, so that writers with an older one can use the plain insert. An id is unique in
-- its normal form; of those that are there twice in different forms, later ones get an id of their own, so that no message is lost.
create table postroom_outbox_8 (
    seq               integer primary key autoincrement,
    id                text    not null
        check (length(replace(id, '-', '')) = 32 and id not glob '*[^0-9a-fA-F-]*'),
    topic             text    not null check (length(cast(topic as blob)) between 1 and 255),
    type              text    not null check (length(cast(type as blob)) between 1 and 255),
    payload           any     not null
        check (typeof(payload) in ('blob', 'text') and length(cast(payload as blob)) <= 1048576),
    key               text    check (length(cast(key as blob)) between 1 and 512),
    routing_key       text    check (length(cast(routing_key as blob)) <= 255),
    content_type      text    not null default 'application/octet-stream',
    headers           text    check (headers is null or json_type(headers) = 'object'),
    tenant_id         text    check (length(cast(tenant_id as blob)) <= 512),
    aggregate_type    text    check (length(cast(aggregate_type as blob)) <= 255),
    aggregate_id      text    check (length(cast(aggregate_id as blob)) between 1 and 512),
    aggregate_version integer,
    occurred_ms       integer not null default (cast((julianday('now') - 2440587.5) * 86400000.0 as integer)),
    visible_ms        integer
) strict;
insert into postroom_outbox_8
select o.seq,
       case when row_number() over (partition by replace(lower(o.id), '-', '') order by o.seq) = 1 then o.id
            else lower(hex(randomblob(4))) || '-' || lower(hex(randomblob(2))) || '-4' || substr(lower(hex(randomblob(2))), 2)
                 || '-a' || substr(lower(hex(randomblob(2))), 2) || '-' || lower(hex(randomblob(6))) end,
       -- What a strict table refuses is kept as text, so that it is set aside alone.
       cast(o.topic as text), cast(o.type as text), o.payload, cast(o.key as text), cast(o.routing_key as text),
       cast(o.content_type as text), cast(o.headers as text), cast(o.tenant_id as text), cast(o.aggregate_type as text), cast(o.aggregate_id as text),
       o.aggregate_version, o.occurred_ms, o.visible_ms
  from postroom_outbox o order by o.seq;
delete from sqlite_sequence where name = 'postroom_outbox_8';
insert into sqlite_sequence (name, seq) select 'postroom_outbox_8', s.seq from sqlite_sequence s where s.name = 'postroom_outbox';
drop table postroom_outbox;
alter table postroom_outbox_8 rename to postroom_outbox;
-- Limits of before hold for rows of before.
create trigger postroom_outbox_limits before insert on postroom_outbox begin
    select case
        when length(cast(new.content_type as blob)) not between 1 and 255 then raise(abort, 'content_type must have 1 to 255 bytes')
        when length(cast(new.headers as blob)) > 65536 then raise(abort, 'headers have more than 65536 bytes')
    end;
end;
create unique index postroom_outbox_id on postroom_outbox (replace(lower(id), '-', ''));

create table postroom_inbox_8 (
    consumer     text    not null check (length(cast(consumer as blob)) between 1 and 255),
    message_id   text    not null,
    processed_ms integer not null default (cast((julianday('now') - 2440587.5) * 86400000.0 as integer)),
    primary key (consumer, message_id)
) strict, without rowid;
insert into postroom_inbox_8 select cast(consumer as text), cast(message_id as text), processed_ms from postroom_inbox;
drop table postroom_inbox;
alter table postroom_inbox_8 rename to postroom_inbox;
create index postroom_inbox_age on postroom_inbox (processed_ms);

-- What a relay says about itself with each renewal.
create table postroom_relays (
    route              text    not null,
    owner              text    not null,
    seen_ms            integer not null,
    expires_ms         integer not null,
    sink               text,
    sink_blocked       integer not null default 0,
    sink_down_since_ms integer,
    sink_error         text,
    primary key (route, owner)
) strict, without rowid;

alter table postroom_inbox_fillers add column source text;
alter table postroom_inbox_fillers add column source_down_ms integer;
alter table postroom_inbox_fillers add column source_error text;
alter table postroom_inbox_messages add column received_ms integer;

-- The oldest program that can work with the schema, by the number of the newest migration that it knows.
alter table postroom_settings add column oldest_program integer not null default 8;
