-- What an operator does to the database is noticed: a restore in place, a sequence that is set back, other settings of a route.

-- Which database and table these rows were written in. After a restore they name another one.
alter table postroom.settings
    add column database_oid oid,
    add column outbox_oid   oid,
    add column incarnation  bigint not null default 1,
    add column rebased_at   timestamptz;
update postroom.settings
   set database_oid = (select d.oid from pg_database d where d.datname = current_database()),
       outbox_oid = 'postroom.outbox'::regclass;

-- Messages up to this seq were passed before the last re-basing, by a history that this database need not share.
alter table postroom.lanes add column rebased_seq bigint not null default 0;

-- A seq is never used twice in a lane. A sequence that was set back makes a write fail rather than hide a message.
create unique index outbox_turn on postroom.outbox (lane, seq);
drop index postroom.outbox_fresh;
alter index postroom.outbox_turn rename to outbox_fresh;

-- How long a relay's lease is, so that others can tell its silence by their own clocks.
alter table postroom.relays add column lease_ms bigint;

-- When the wait of a parked message began: a clock that went back shows by it.
alter table postroom.parked add column waits_since timestamptz;

-- A route's settings are the database's. A relay that starts can add topics and make order and on_dead stricter; what makes
-- them looser is an operator's act. Each change is kept: it says why a message was passed by.
alter table postroom.routes
    add column ordering text check (ordering in ('key', 'pipelined', 'none')),
    add column on_dead  text check (on_dead in ('skip', 'block')),
    add column revision integer not null default 1;
create table postroom.route_revisions (
    route    text        not null,
    revision integer     not null,
    topics   text[]      not null,
    ordering text,
    on_dead  text,
    set_by   text        not null,
    set_at   timestamptz not null default clock_timestamp(),
    primary key (route, revision)
);
insert into postroom.route_revisions (route, revision, topics, set_by)
select name, revision, topics, 'migration 6' from postroom.routes;

create function postroom.register_route(
    route         text,
    topics        text[],
    ordering      text,
    on_dead       text,
    set_by        text,
    out topics_now   text[],
    out ordering_now text,
    out on_dead_now  text,
    out revision_now integer
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    known postroom.routes;
begin
    insert into postroom.routes as r (name, topics, ordering, on_dead)
    values (register_route.route, register_route.topics, register_route.ordering, register_route.on_dead)
        on conflict (name) do nothing;
    if found then
        insert into postroom.route_revisions (route, revision, topics, ordering, on_dead, set_by)
        values (register_route.route, 1, register_route.topics, register_route.ordering, register_route.on_dead,
                register_route.set_by)
            on conflict on constraint route_revisions_pkey do nothing;
    end if;
    select * into strict known from postroom.routes r where r.name = register_route.route for no key update;
    topics_now := known.topics || array(
        select t.topic from unnest(register_route.topics) with ordinality t (topic, n)
         where t.topic <> all (known.topics) and '*' <> all (known.topics) order by t.n);
    ordering_now := case
        when known.ordering is null then register_route.ordering
        when 'key' in (known.ordering, register_route.ordering) then 'key'
        when 'pipelined' in (known.ordering, register_route.ordering) then 'pipelined'
        else 'none' end;
    on_dead_now := case
        when known.on_dead is null then register_route.on_dead
        when 'block' in (known.on_dead, register_route.on_dead) then 'block'
        else 'skip' end;
    revision_now := known.revision;
    if (topics_now, ordering_now, on_dead_now) is distinct from (known.topics, known.ordering, known.on_dead) then
        perform postroom.change_route(register_route.route, topics_now, ordering_now, on_dead_now, register_route.set_by);
        revision_now := known.revision + 1;
    end if;
end
$$;

-- Gives a route these settings and keeps the change. The caller has locked the route's row.
create function postroom.change_route(route text, topics text[], ordering text, on_dead text, set_by text) returns void
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    update postroom.routes r
       set topics = change_route.topics, ordering = change_route.ordering, on_dead = change_route.on_dead,
           revision = r.revision + 1
     where r.name = change_route.route;
    insert into postroom.route_revisions (route, revision, topics, ordering, on_dead, set_by)
    select r.name, r.revision, r.topics, r.ordering, r.on_dead, change_route.set_by
      from postroom.routes r where r.name = change_route.route
        on conflict on constraint route_revisions_pkey do update
       set topics = excluded.topics, ordering = excluded.ordering, on_dead = excluded.on_dead,
           set_by = excluded.set_by, set_at = clock_timestamp();
$$;

-- Whether positions and settings are those of this very database and outbox. Null while the settings are missing.
create function postroom.at_home() returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select s.database_oid = (select d.oid from pg_database d where d.datname = current_database())
       and s.outbox_oid = to_regclass('postroom.outbox')::oid
      from postroom.settings s
$$;

-- Indexes that are missing or not valid. A restore makes them last, so an empty list also says that it is complete.
create function postroom.missing_indexes() returns text[]
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce(array_agg(n.name), '{}')
      from unnest(array['outbox_fresh', 'outbox_late', 'outbox_id', 'lanes_pkey', 'settings_pkey', 'routes_pkey',
                        'relays_pkey', 'parked_pkey', 'parked_due', 'parked_key', 'dead_letters_pkey',
                        'blocked_keys_pkey', 'suspects_pkey', 'migrations_pkey']) n (name)
     where not exists (select from pg_index i where i.indexrelid = to_regclass('postroom.' || n.name) and i.indisvalid)
$$;

-- Whether the rows come from another cluster, database or table, or transaction ids went back.
create function postroom.positions_are_foreign() returns boolean
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select postroom.at_home() is not true
        or exists (select from postroom.settings s, pg_control_system() c where s.system_identifier <> c.system_identifier)
        or exists (select from postroom.lanes l
                    where pg_snapshot_xmax(l.position_snapshot) > pg_snapshot_xmax(pg_current_snapshot()))
$$;

-- How far the sequence has come, the highest seq known, and since when messages may be out of their place: those that no read
-- would find (of transactions that a position has not seen, and at or below its floor, which every such transaction should be
-- above), those whose seq belongs to another message that is parked or dead, and, while the sequence is behind, whatever was
-- written after the highest seq. Null: none are.
create function postroom.seqs_astray(out last bigint, out top bigint, out since timestamptz)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    newest bigint := (select max(o.seq) from postroom.outbox o);
begin
    select case when s.is_called then s.last_value else s.last_value - 1 end into last from postroom.outbox_seq_seq s;
    select greatest(last, newest, (select max(greatest(l.position_seq, l.floor_seq, l.catch_up_seq)) from postroom.lanes l),
                    (select max(p.seq) from postroom.parked p), (select max(d.seq) from postroom.dead_letters d))
      into top;
    select min(w.occurred_at) into since from (
        select o.occurred_at
          from postroom.outbox o
          join postroom.lanes l on l.lane = o.lane
         where o.xid >= pg_snapshot_xmax(l.position_snapshot)
           and o.seq <= case when last < top then greatest(l.position_seq, l.floor_seq) else l.floor_seq end
        union all
        select o.occurred_at
          from (select p.route, p.seq, p.id from postroom.parked p
                 union all
                select d.route, d.seq, d.id from postroom.dead_letters d) t
          join postroom.outbox o on o.seq = t.seq and o.id <> t.id
          join postroom.lanes l on l.route = t.route and l.lane = o.lane
         where o.seq > l.position_seq or not pg_visible_in_snapshot(o.xid, l.position_snapshot)
        union all
        select o.occurred_at + interval '1 microsecond' from postroom.outbox o where o.seq = newest and last < newest) w;
end
$$;

-- Looks whether positions still mean what they meant, and puts right what does not; returns what was done:
-- 'nothing', 'sequence' (it had gone back) or 'rebased' (the rows come from another cluster, database or table).
-- Run by a relay when it notices something, and by anybody at any time: where all is well it changes nothing.
create function postroom.mend() returns text
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    missing text[] := postroom.missing_indexes();
    foreign_rows boolean;
    astray  record;
    moved   bigint := 0;
begin
    if missing <> '{}' then
        raise exception 'the schema postroom is not whole: missing %', array_to_string(missing, ', ')
            using errcode = 'object_not_in_prerequisite_state',
                  hint = 'a restore is under way or ended early; when it is complete this goes away by itself';
    end if;
    foreign_rows := postroom.positions_are_foreign();
    astray := postroom.seqs_astray();
    if not foreign_rows and astray.since is null and astray.last >= astray.top then
        return 'nothing';
    end if;
    -- Taken before the sequence is read again: see checkpoint().
    perform pg_current_xact_id();
    if foreign_rows then
        lock table postroom.lanes, postroom.outbox, postroom.settings in access exclusive mode;
        -- Another relay may have done it while we waited for the lock.
        foreign_rows := postroom.positions_are_foreign();
    else
        -- Without writers in between the order is kept whole. A long transaction is not waited for: then some messages that are
        -- written at this moment may change places.
        begin
            perform set_config('lock_timeout', '1s', true);
            lock table postroom.outbox in share row exclusive mode;
        exception when lock_not_available then
            null;
        end;
        perform set_config('lock_timeout', '0', true);
    end if;
    astray := postroom.seqs_astray();

    if astray.since is not null then
        -- They, and whatever came with or after them, take new places at the end, in the order of their time: that of their
        -- seqs is lost.
        with gone as (
            delete from postroom.outbox o
             where o.occurred_at >= astray.since
               and o.xid >= (select pg_snapshot_xmin(l.position_snapshot) from postroom.lanes l
                              order by pg_snapshot_xmin(l.position_snapshot) limit 1)
            returning o.*
        ), again as (
            insert into postroom.outbox (seq, occurred_at, visible_at, aggregate_version, id, topic, type, payload, key,
                                         routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id)
            overriding system value
            select astray.top + 500000 + row_number() over (order by g.occurred_at, g.seq), g.occurred_at, g.visible_at,
                   g.aggregate_version, g.id, g.topic, g.type, g.payload, g.key, g.routing_key, g.content_type, g.headers,
                   g.tenant_id, g.aggregate_type, g.aggregate_id
              from gone g
            returning 1
        )
        select count(*) into moved from again;
    end if;

    if foreign_rows then
        -- By the numbers of the old history, what is at or below a position without having been consumed is parked; what is
        -- above stays fresh. Then every row gets an id older than any snapshot here.
        insert into postroom.parked (route, seq, lane, ordering_key, state, attempts, due_at, last_error, id, topic, type,
                                     payload, key, routing_key, content_type, headers, tenant_id, aggregate_type,
                                     aggregate_id, aggregate_version, occurred_at)
        select l.route, o.seq, o.lane, case when r.ordering is distinct from 'none' then coalesce(o.key, o.aggregate_id) end,
               'queued', 0, clock_timestamp(), 'not yet consumed when the database was restored', o.id, o.topic, o.type,
               o.payload, o.key, o.routing_key, o.content_type, o.headers, o.tenant_id, o.aggregate_type, o.aggregate_id,
               o.aggregate_version, o.occurred_at
          from postroom.lanes l
          join postroom.routes r on r.name = l.route
          join postroom.outbox o on o.lane = l.lane and o.seq <= l.position_seq
         where not pg_visible_in_snapshot(o.xid, l.position_snapshot)
           and not (l.catch_up_snapshot is not null and o.seq <= l.catch_up_seq
                    and pg_visible_in_snapshot(o.xid, l.catch_up_snapshot))
           and exists (select from unnest(r.topics) t
                        where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))
           and not exists (select from postroom.dead_letters d where d.route = l.route and d.seq = o.seq)
            on conflict (route, seq) do nothing;
        update postroom.parked p set state = 'retry'
         where p.state = 'queued'
           and (p.ordering_key is null
                or p.seq = (select min(q.seq) from postroom.parked q
                             where q.route = p.route and q.ordering_key = p.ordering_key and q.state <> 'scheduled'));
        update postroom.outbox set xid = '3';
        update postroom.lanes
           set position_snapshot = pg_current_snapshot(), catch_up_snapshot = null, catch_up_seq = null,
               rebased_seq = position_seq, floor_seq = greatest(position_seq, astray.last),
               owner = null, expires_at = null,
               -- Never one that was used: the backup may be restored a second time, and bring an epoch of before back.
               epoch = greatest(epoch + 1, pg_current_xact_id()::text::bigint * 1000000);
        update postroom.settings
           set system_identifier = (select c.system_identifier from pg_control_system() c),
               database_oid = (select d.oid from pg_database d where d.datname = current_database()),
               outbox_oid = to_regclass('postroom.outbox')::oid, rebased_at = clock_timestamp();
    end if;

    if astray.last < astray.top or moved > 0 then
        -- Last, so that nobody takes a place at the new end before the others are there. What is drawn between reading the
        -- sequence and this stays far below it.
        perform setval('postroom.outbox_seq_seq', astray.top + 1000000 + moved);
    end if;
    if foreign_rows or astray.last < astray.top or moved > 0 then
        -- Every relay reads again from what is stored.
        update postroom.settings set incarnation = greatest(incarnation + 1, pg_current_xact_id()::text::bigint);
        return case when foreign_rows then 'rebased' else 'sequence' end;
    end if;
    return 'nothing';
end
$$;

-- `truncate ... restart identity` would hand out seqs again that positions have passed: the sequence goes on where it was.
create function postroom.note_sequence() returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform set_config('postroom.last_seq', (select s.last_value::text from postroom.outbox_seq_seq s), true);
    return null;
end
$$;
create function postroom.keep_sequence() returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform setval('postroom.outbox_seq_seq',
                   greatest(current_setting('postroom.last_seq')::bigint, (select s.last_value from postroom.outbox_seq_seq s)));
    return null;
end
$$;
create trigger note_sequence before truncate on postroom.outbox for each statement execute function postroom.note_sequence();
create trigger keep_sequence after truncate on postroom.outbox for each statement execute function postroom.keep_sequence();
revoke execute on function postroom.mend() from public;

alter table postroom.audit drop constraint audit_action_check;
alter table postroom.audit add constraint audit_action_check check (action in
    ('dead.retry', 'dead.discard', 'key.park', 'key.unpark', 'key.skip', 'inbox.retry', 'inbox.discard', 'inbox.prune',
     'route.set'));
