-- Foundation: outbox, lanes, parked messages, dead letters, inbox, and the one function that every language calls.
-- {{lanes}} is replaced by the number of lanes chosen at `postroom migrate --lanes N`.

-- UUIDv7 (RFC 9562): 48 bits of milliseconds, version, 74 random bits. PostgreSQL has its own only from version 18.
create function postroom.uuid_v7() returns uuid
language sql volatile parallel safe
as $$
    select encode(set_byte(b, 6, (get_byte(b, 6) & 15) | 112), 'hex')::uuid
      from (select overlay(uuid_send(gen_random_uuid())
                placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3) from 1 for 6) as b) r
$$;

-- What was chosen once.
create table postroom.settings (
    only_row          boolean  primary key default true check (only_row),
    lanes             smallint not null check (lanes between 1 and 1024),
    system_identifier bigint   not null
);
insert into postroom.settings (lanes, system_identifier)
select {{lanes}}, system_identifier from pg_control_system();

-- Rows are appended and never updated. xid stands before seq: column defaults are evaluated in order, so a row's
-- transaction id is older than its seq, which the log source builds upon. Neither is ever to be given by a writer.
create table postroom.outbox (
    xid               xid8        not null default pg_current_xact_id(),
    seq               bigint      not null generated always as identity,
    occurred_at       timestamptz not null default clock_timestamp(),
    visible_at        timestamptz,
    aggregate_version bigint,
    id                uuid        not null default postroom.uuid_v7(),
    topic             text        not null,
    type              text        not null,
    payload           bytea       not null,
    key               text,
    routing_key       text,
    content_type      text        not null default 'application/octet-stream',
    headers           json, -- not jsonb, which cannot hold \u0000
    tenant_id         text,
    aggregate_type    text,
    aggregate_id      text,
    lane              smallint    not null generated always as
        ((abs(hashtextextended(coalesce(key, aggregate_id, id::text), 0) % {{lanes}}))::smallint) stored,
    constraint outbox_topic_has_1_to_255_bytes        check (octet_length(topic) between 1 and 255),
    constraint outbox_type_has_1_to_255_bytes         check (octet_length(type) between 1 and 255),
    constraint outbox_payload_has_at_most_1048576_bytes check (octet_length(payload) <= 1048576),
    constraint outbox_key_has_1_to_512_bytes          check (octet_length(key) between 1 and 512),
    constraint outbox_routing_key_has_at_most_255_bytes check (octet_length(routing_key) <= 255),
    constraint outbox_content_type_has_1_to_255_bytes check (octet_length(content_type) between 1 and 255),
    constraint outbox_headers_are_an_object_of_at_most_65536_bytes
        check (json_typeof(headers) = 'object' and octet_length(headers::text) <= 65536),
    constraint outbox_tenant_id_has_at_most_512_bytes check (octet_length(tenant_id) <= 512),
    constraint outbox_aggregate_type_has_at_most_255_bytes check (octet_length(aggregate_type) <= 255),
    constraint outbox_aggregate_id_has_1_to_512_bytes check (octet_length(aggregate_id) between 1 and 512)
);
-- No index holds the payload.
create index outbox_fresh on postroom.outbox (lane, seq);         -- fresh reads, in order
create index outbox_late on postroom.outbox (xid, lane, seq);     -- late reads: rows of one transaction, in order
create unique index outbox_id on postroom.outbox (id);            -- look-ups; a message is written once

comment on table postroom.outbox is
    'Messages, appended in the business transaction. Rows are never updated; progress is kept in postroom.lanes.';

-- One row a route and lane: who relays it, and how far it has come.
-- Position (snapshot, seq): consumed is every row visible in the snapshot with a seq up to that one. While late rows are
-- being caught up in pieces, (catch_up_snapshot, catch_up_seq) says how far within them.
create table postroom.lanes (
    route              text        not null check (octet_length(route) between 1 and 255),
    lane               smallint    not null,
    owner              text,
    epoch              bigint      not null default 0,
    expires_at         timestamptz,
    position_snapshot  pg_snapshot not null default '1:1:',
    position_seq       bigint      not null default 0,
    floor_seq          bigint      not null default 0,
    catch_up_snapshot  pg_snapshot,
    catch_up_seq       bigint,
    settled_at         timestamptz,
    primary key (route, lane)
) with (fillfactor = 50);

create table postroom.routes (
    name       text        primary key,
    topics     text[]      not null,
    created_at timestamptz not null default clock_timestamp()
);

-- Messages that wait: for a retry, for their time, or behind another message of their key. Full copies.
create table postroom.parked (
    route             text        not null,
    seq               bigint      not null,
    lane              smallint    not null,
    ordering_key      text,
    state             text        not null check (state in ('retry', 'scheduled', 'queued')),
    attempts          integer     not null default 0,
    due_at            timestamptz not null,
    parked_at         timestamptz not null default clock_timestamp(),
    last_error        text,
    id                uuid        not null,
    topic             text        not null,
    type              text        not null,
    payload           bytea       not null,
    key               text,
    routing_key       text,
    content_type      text        not null,
    headers           json,
    tenant_id         text,
    aggregate_type    text,
    aggregate_id      text,
    aggregate_version bigint,
    occurred_at       timestamptz not null,
    primary key (route, seq)
);
create index parked_due on postroom.parked (route, due_at) where state <> 'queued';
create index parked_key on postroom.parked (route, ordering_key, seq) where state <> 'scheduled';

-- Messages that no relay will send any more. Full copies, never purged by themselves.
create table postroom.dead_letters (
    route             text        not null,
    seq               bigint      not null,
    lane              smallint    not null,
    attempts          integer     not null,
    cause             text        not null check (cause in ('exhausted', 'permanent', 'poison')),
    error             text        not null,
    died_at           timestamptz not null default clock_timestamp(),
    id                uuid        not null,
    topic             text        not null,
    type              text        not null,
    payload           bytea       not null,
    key               text,
    routing_key       text,
    content_type      text        not null,
    headers           json,
    tenant_id         text,
    aggregate_type    text,
    aggregate_id      text,
    aggregate_version bigint,
    occurred_at       timestamptz not null,
    primary key (route, seq)
);
create index dead_letters_id on postroom.dead_letters (id);

-- One row for each effect: the primary key is the claim.
create table postroom.inbox (
    message_id   uuid        not null,
    consumer     text        not null check (octet_length(consumer) between 1 and 255),
    processed_at timestamptz not null default clock_timestamp(),
    primary key (consumer, message_id)
);

-- How far back late rows have to be looked for: the sequence is read first, a transaction id is taken after it. Every
-- transaction that gets a later id takes its seqs later still, so above `floor_seq`.
create function postroom.checkpoint(out floor_seq bigint, out xid xid8)
language plpgsql volatile
as $$
begin
    if pg_current_xact_id_if_assigned() is not null then
        raise exception 'postroom.checkpoint must run in a transaction of its own';
    end if;
    select case when s.is_called then s.last_value else s.last_value - 1 end
      into floor_seq from postroom.outbox_seq_seq s;
    xid := pg_current_xact_id();
end
$$;

-- The contract for every language: call it in the transaction that changes the business rows.
create function postroom.enqueue(
    topic             text,
    type              text,
    payload           bytea,
    key               text     default null,
    headers           jsonb    default null,
    routing_key       text     default null,
    tenant_id         text     default null,
    aggregate_type    text     default null,
    aggregate_id      text     default null,
    aggregate_version bigint   default null,
    content_type      text     default 'application/octet-stream',
    delay             interval default null,
    id                uuid     default null
) returns uuid
language plpgsql volatile
as $$
#variable_conflict use_variable
declare
    message_id uuid := coalesce(enqueue.id, postroom.uuid_v7());
    problem    text;
begin
    problem := case
        when enqueue.topic is null or enqueue.topic = '' then 'topic is empty'
        when octet_length(enqueue.topic) > 255 then format('topic has %s bytes, the limit is 255', octet_length(enqueue.topic))
        when enqueue.type is null or enqueue.type = '' then 'type is empty'
        when octet_length(enqueue.type) > 255 then format('type has %s bytes, the limit is 255', octet_length(enqueue.type))
        when enqueue.payload is null then 'payload is null; an empty payload is '''''
        when octet_length(enqueue.payload) > 1048576
            then format('payload has %s bytes, the limit is 1048576', octet_length(enqueue.payload))
        when enqueue.key = '' then 'key is empty; leave it out for a message without order'
        when octet_length(enqueue.key) > 512 then format('key has %s bytes, the limit is 512', octet_length(enqueue.key))
        when enqueue.aggregate_id = '' then 'aggregate_id is empty; leave it out'
        when octet_length(enqueue.aggregate_id) > 512
            then format('aggregate_id has %s bytes, the limit is 512', octet_length(enqueue.aggregate_id))
        when octet_length(enqueue.aggregate_type) > 255
            then format('aggregate_type has %s bytes, the limit is 255', octet_length(enqueue.aggregate_type))
        when octet_length(enqueue.tenant_id) > 512
            then format('tenant_id has %s bytes, the limit is 512', octet_length(enqueue.tenant_id))
        when octet_length(enqueue.routing_key) > 255
            then format('routing_key has %s bytes, the limit is 255', octet_length(enqueue.routing_key))
        when enqueue.content_type is null or octet_length(enqueue.content_type) not between 1 and 255
            then 'content_type wants 1 to 255 bytes'
        when enqueue.delay < interval '0' then format('delay is negative (%s)', enqueue.delay)
        when jsonb_typeof(enqueue.headers) <> 'object' then 'headers must be an object of text values'
        when octet_length(enqueue.headers::text) > 65536 then 'headers have more than 65536 bytes'
        when exists (select from jsonb_each(case jsonb_typeof(enqueue.headers) when 'object' then enqueue.headers end)
                     having count(*) > 64 or bool_or(jsonb_typeof(value) <> 'string'))
            then 'headers must be an object of at most 64 text values'
    end;
    if problem is not null then
        raise exception 'postroom.enqueue: %', problem
            using errcode = 'invalid_parameter_value', hint = 'nothing was enqueued; roll the transaction back';
    end if;
    insert into postroom.outbox (id, topic, type, payload, key, headers, routing_key, tenant_id, aggregate_type,
                                 aggregate_id, aggregate_version, content_type, visible_at)
    values (message_id, enqueue.topic, enqueue.type, enqueue.payload, enqueue.key, enqueue.headers::json,
            enqueue.routing_key, enqueue.tenant_id, enqueue.aggregate_type, enqueue.aggregate_id,
            enqueue.aggregate_version, enqueue.content_type, clock_timestamp() + enqueue.delay);
    return message_id;
end
$$;

-- The same for a text payload: its bytes in UTF-8.
create function postroom.enqueue(
    topic text, type text, payload text, key text default null, headers jsonb default null,
    routing_key text default null, tenant_id text default null, aggregate_type text default null,
    aggregate_id text default null, aggregate_version bigint default null,
    content_type text default 'text/plain; charset=utf-8', delay interval default null, id uuid default null
) returns uuid
language sql volatile
as $$
    select postroom.enqueue(topic, type, convert_to(payload, 'UTF8'), key, headers, routing_key, tenant_id,
        aggregate_type, aggregate_id, aggregate_version, content_type, delay, id)
$$;

-- The same for a jsonb payload: the bytes of its text form (jsonb reorders keys; give text or bytea where bytes matter).
create function postroom.enqueue(
    topic text, type text, payload jsonb, key text default null, headers jsonb default null,
    routing_key text default null, tenant_id text default null, aggregate_type text default null,
    aggregate_id text default null, aggregate_version bigint default null,
    content_type text default 'application/json', delay interval default null, id uuid default null
) returns uuid
language sql volatile
as $$
    select postroom.enqueue(topic, type, convert_to(payload::text, 'UTF8'), key, headers, routing_key, tenant_id,
        aggregate_type, aggregate_id, aggregate_version, content_type, delay, id)
$$;

-- For people and reports; a payload that is not JSON shows as null.
create function postroom.payload_as_json(payload bytea) returns jsonb
language plpgsql immutable parallel safe
as $$
begin
    return convert_from(payload, 'UTF8')::jsonb;
exception when others then
    return null;
end
$$;

create view postroom.outbox_json as
    select seq, id, topic, type, key, aggregate_type, aggregate_id, aggregate_version, tenant_id, occurred_at, visible_at,
           headers, postroom.payload_as_json(payload) as payload
      from postroom.outbox;
