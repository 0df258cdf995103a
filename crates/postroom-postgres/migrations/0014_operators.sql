-- What operators see of relays and fillers, who did what, and which programs the schema works with.

-- What a relay publishes to, and whether that takes nothing although its connection is up.
alter table postroom.relays
    add column sink         text,
    add column sink_blocked boolean not null default false;

-- What a filler receives from, and why nothing can be received now.
alter table postroom.inbox_fillers
    add column source            text,
    add column source_down_since timestamptz,
    add column source_error      text;

-- The role of whoever wrote a row, besides the name that they gave. Rows of before do not know it.
alter table postroom.audit add column db_role text;
alter table postroom.audit alter column db_role set default session_user;
alter table postroom.audit drop constraint audit_action_check;
alter table postroom.audit add constraint audit_action_check check (action in
    ('dead.retry', 'dead.discard', 'key.park', 'key.unpark', 'key.skip', 'inbox.retry', 'inbox.discard', 'inbox.prune',
     'route.set', 'route.forget'));

-- The oldest program that can work with the schema, by the number of the newest migration that it knows. A migration that would
-- mislead older programs raises it, and they refuse to start.
alter table postroom.settings add column oldest_program integer not null default 13;

-- Removes a route that is gone for good, with everything that is kept for it, and writes the audit row. Returns what it had: messages
-- in front of its position (counted up to 1,000 a lane), parked ones, dead letters, relays that run it. Nothing is changed while a relay
-- runs it, and nothing without `discard` while it has unsent or dead messages. No row: there is no such route.
create function postroom.forget_route(
    route   text,
    discard boolean,
    actor   text,
    reason  text,
    out unread          bigint,
    out unread_is_bound boolean,
    out parked          bigint,
    out dead            bigint,
    out relays          bigint,
    out done            boolean
) returns setof record
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
    perform from postroom.routes r where r.name = forget_route.route for update;
    if not found then
        return;
    end if;
    -- What a relay records comes before this, or finds nothing any more.
    perform from postroom.lanes l where l.route = forget_route.route order by l.lane for update;
    select count(*) into relays from postroom.relays r
     where r.route = forget_route.route and r.expires_at > clock_timestamp();
    select coalesce(sum(u.matching), 0), coalesce(bool_or(u.looked >= 1000), false)
      into unread, unread_is_bound
      from postroom.routes r
      join postroom.lanes l on l.route = r.name
     cross join lateral (
         select count(*) as looked,
                count(*) filter (where exists (select from unnest(r.topics) t
                                                where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))) as matching
           from ((select f.topic from postroom.outbox f where f.lane = l.lane and f.seq > l.position_seq order by f.seq limit 1000)
                 union all
                 (select late.topic
                    from pg_snapshot_xip(l.position_snapshot) x (xid)
                   cross join lateral (select f.topic from postroom.outbox f
                                        where f.xid = x.xid and f.lane = l.lane and f.seq <= l.position_seq limit 1000) late
                   limit 1000)
                 union all
                 (select f.topic from postroom.outbox f
                   where f.lane = l.lane and f.seq > l.floor_seq and f.seq <= l.position_seq
                     and f.xid >= pg_snapshot_xmax(l.position_snapshot) limit 1000)) o) u
     where r.name = forget_route.route;
    select count(*) into parked from postroom.parked p where p.route = forget_route.route;
    select count(*) into dead from postroom.dead_letters d where d.route = forget_route.route;
    done := relays = 0 and (forget_route.discard or (unread = 0 and not unread_is_bound and parked = 0 and dead = 0));
    if done then
        insert into postroom.audit (actor, action, reason, filter, message_ids)
        select forget_route.actor, 'route.forget', forget_route.reason,
               jsonb_build_object('route', forget_route.route, 'unread', unread, 'unread_is_bound', unread_is_bound),
               array(select p.id from postroom.parked p where p.route = forget_route.route
                     union all
                     select d.id from postroom.dead_letters d where d.route = forget_route.route);
        delete from postroom.suspects s where s.route = forget_route.route;
        delete from postroom.blocked_keys b where b.route = forget_route.route;
        delete from postroom.parked p where p.route = forget_route.route;
        delete from postroom.dead_letters d where d.route = forget_route.route;
        delete from postroom.relays r where r.route = forget_route.route;
        delete from postroom.lanes l where l.route = forget_route.route;
        delete from postroom.route_revisions v where v.route = forget_route.route;
        delete from postroom.routes r where r.name = forget_route.route;
    end if;
    return next;
end
$$;
revoke execute on function postroom.forget_route(text, boolean, text, text) from public;

-- The limits of headers are those of the table and of the library: 65,536 bytes as text, and names that every broker takes.
create or replace function postroom.enqueue(
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
set search_path = pg_catalog, pg_temp
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
    end;
    -- Most messages have none, and a look into them costs as much as all the rest.
    if problem is null and enqueue.headers is not null then
        problem := case
            when jsonb_typeof(enqueue.headers) <> 'object' then 'headers must be an object of text values'
            when octet_length(enqueue.headers::text) > 65536
                then format('headers have %s bytes as text, the limit is 65536', octet_length(enqueue.headers::text))
            when exists (select from jsonb_each(enqueue.headers) h where jsonb_typeof(h.value) <> 'string')
                then 'headers must be an object of text values'
            when exists (select from jsonb_object_keys(enqueue.headers) h (name) where octet_length(h.name) not between 1 and 255)
                then 'a header''s name must have 1 to 255 bytes'
        end;
    end if;
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
