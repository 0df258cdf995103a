-- Messages may leave the outbox for an archive before they are removed. What leaves is first written down here as a segment: whoever
-- dies in between leaves something that the next process finishes in the same way, so that nothing is lost and nothing archived twice.

alter table postroom.audit drop constraint audit_action_check;
alter table postroom.audit add constraint audit_action_check check (action in
    ('dead.retry', 'dead.discard', 'dead.expire', 'dead.note', 'key.park', 'key.unpark', 'key.skip', 'inbox.retry', 'inbox.discard',
     'inbox.expire', 'inbox.prune', 'audit.expire', 'route.set', 'route.forget', 'replay', 'operation.begin', 'operation.pause',
     'operation.resume', 'operation.cancel', 'archive.restore'));

-- Once a message of this outbox was archived, none is removed without that.
alter table postroom.settings add column archives boolean not null default false;
-- Names this outbox, so that an archive can hold several; and how many segments were ended.
alter table postroom.settings add column outbox_id uuid not null default gen_random_uuid();
alter table postroom.settings add column archived_segments bigint not null default 0;

create table postroom.archive_segments (
    id          uuid        primary key,
    -- The messages that are still in the outbox. By their ids too: after a restore, or for a sequence that somebody set back, the same
    -- places may be those of other messages.
    lanes       smallint[]  not null,
    seqs        bigint[]    not null,
    ids         uuid[]      not null,
    stored      boolean     not null default false, -- the archive has them, read back
    begun_at    timestamptz not null default clock_timestamp(),
    taken_until timestamptz not null  -- a process is at it
);

-- Messages that came back from an archive: it has them already. They stay until this time, and until every route is done with them.
create table postroom.archive_restored (
    id          uuid        primary key,
    lane        smallint    not null,
    seq         bigint      not null,
    stays_until timestamptz not null
);
create index archive_restored_until on postroom.archive_restored (stays_until);

-- Finds rows of one lane of the outbox that may be removed, of those after `after`, and looks at `max` of them, in the order of their seqs:
-- rows that every route has passed, that are not parked, of a topic that some route took when they were written, and that are older than
-- the age for their topic. `patterns` and `ages` are parallel: the first pattern that fits gives the age, a null age means for ever, and
-- where none fits it is `usual`. Rows that are on their way to an archive, or came from one, are not meant. Returns their seqs and the
-- bytes of their payloads and headers, the last seq that was looked at, and whether rows behind it may be old enough. Finds nothing while the positions
-- may not be those of this table (a restore, a sequence that went back): a relay puts that right.
create function postroom.outbox_expired(
    lane     smallint,
    after    bigint,
    patterns text[],
    ages     interval[],
    usual    interval,
    max      integer,
    out seqs  bigint[],
    out bytes bigint[],
    out last  bigint,
    out more  boolean
)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    now_     timestamptz := clock_timestamp();
    -- What is younger than this is kept, whatever its topic.
    shortest interval := (select min(a.age) from unnest(outbox_expired.ages || outbox_expired.usual) a (age));
    passed   bigint := (select min(l.position_seq) from postroom.lanes l where l.lane = outbox_expired.lane);
    looked   bigint;
    any_old  boolean;
begin
    seqs := '{}';
    bytes := '{}';
    last := outbox_expired.after;
    more := false;
    if shortest is null or passed is null or passed <= outbox_expired.after then
        return;
    end if;
    if shortest < interval '1 minute' then
        raise exception 'postroom.outbox_expired: % is too short; a minute is the least', shortest
            using errcode = 'invalid_parameter_value';
    end if;
    if not postroom.positions_hold(outbox_expired.lane) then
        return;
    end if;
    with looked_at as materialized (
        select o.seq, o.id, o.xid, o.topic, o.occurred_at, octet_length(o.payload) + coalesce(octet_length(o.headers::text), 0) as size
          from postroom.outbox o
         where o.lane = outbox_expired.lane and o.seq > outbox_expired.after and o.seq <= passed
         order by o.seq limit outbox_expired.max
    ),
    leaving as materialized (
        select i.id from postroom.archive_segments g cross join unnest(g.ids) i (id) where (select s.archives from postroom.settings s)
        union
        select r.id from postroom.archive_restored r join looked_at k on k.id = r.id
    ),
    finished as (
        select k.seq, k.size
          from looked_at k
         cross join lateral (
             select case when exists (select from unnest(outbox_expired.patterns) p
                                       where k.topic = p or (p like '%*' and starts_with(k.topic, left(p, -1))))
                         then (select a.age from unnest(outbox_expired.patterns, outbox_expired.ages) with ordinality as a (pattern, age, place)
                                where k.topic = a.pattern or (a.pattern like '%*' and starts_with(k.topic, left(a.pattern, -1)))
                                order by a.place limit 1)
                         else outbox_expired.usual end as age) a
         where k.occurred_at < now_ - a.age
           and not exists (select from postroom.lanes l
                            where l.lane = outbox_expired.lane
                              and not (k.seq <= l.position_seq and pg_visible_in_snapshot(k.xid, l.position_snapshot)))
           and not exists (select from postroom.routes r join postroom.parked p on p.route = r.name and p.seq = k.seq)
           -- A route that takes the topic now, and took it when the message was written: what it passed before that it has not sent.
           and exists (select from postroom.routes r cross join unnest(r.topics) t
                        where (k.topic = t or (t like '%*' and starts_with(k.topic, left(t, -1))))
                          and k.occurred_at > coalesce((
                              select max(n.set_at) from postroom.route_revisions v
                                join postroom.route_revisions n on n.route = v.route and n.revision = v.revision + 1
                               where v.route = r.name
                                 and not exists (select from unnest(v.topics) b
                                                  where k.topic = b or (b like '%*' and starts_with(k.topic, left(b, -1))))), '-infinity'))
           and k.id not in (select l.id from leaving l)
    )
    select (select coalesce(array_agg(f.seq order by f.seq), '{}') from finished f),
           (select coalesce(array_agg(f.size order by f.seq), '{}') from finished f),
           count(*), coalesce(max(k.seq), outbox_expired.after), coalesce(bool_or(k.occurred_at < now_ - shortest), false)
      into seqs, bytes, looked, last, any_old
      from looked_at k;
    more := looked = outbox_expired.max and any_old;
end
$$;

-- Whether the positions of this lane are those of this table, and every route has one.
create function postroom.positions_hold(lane smallint) returns boolean
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    -- How far the sequence has come, and how far it must have come if it never went back.
    drawn bigint := (select s.last_value - (not s.is_called)::int from postroom.outbox_seq_seq s);
    known bigint := greatest((select max(greatest(l.position_seq, l.floor_seq, l.catch_up_seq)) from postroom.lanes l),
                             (select max(o.seq) from postroom.outbox o where o.lane = positions_hold.lane));
begin
    return not postroom.positions_are_foreign() and drawn >= known
       -- A route without a position in this lane has passed nothing of it.
       and not exists (select from postroom.routes r
                        where not exists (select from postroom.lanes l where l.route = r.name and l.lane = positions_hold.lane));
end
$$;

-- Removes what came back from an archive, has been here for as long as it was to stay, and is finished. At most `max` rows.
create function postroom.archive_forget(max integer) returns bigint
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    removed bigint;
begin
    if not exists (select from postroom.archive_restored r where r.stays_until < clock_timestamp()) then
        return 0;
    end if;
    with due as materialized (
        select r.id, r.lane, r.seq from postroom.archive_restored r
         where r.stays_until < clock_timestamp() and postroom.positions_hold(r.lane)
           and not exists (select from postroom.outbox o join postroom.lanes l on l.lane = o.lane
                            where o.lane = r.lane and o.seq = r.seq and o.id = r.id
                              and not (o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot)))
           and not exists (select from postroom.routes t join postroom.parked p on p.route = t.name and p.seq = r.seq)
         limit archive_forget.max
    ),
    gone as (
        delete from postroom.outbox o using due d where o.lane = d.lane and o.seq = d.seq and o.id = d.id
    ),
    forgotten as (
        delete from postroom.archive_restored r using due d where r.id = d.id returning 1
    )
    select count(*) into removed from forgotten;
    return removed;
end
$$;

-- As before; and nothing is removed from an outbox that is archived.
create or replace function postroom.retain_outbox(
    lane     smallint,
    after    bigint,
    patterns text[],
    ages     interval[],
    usual    interval,
    max      integer,
    out removed bigint,
    out looked  bigint,
    out last    bigint,
    out more    boolean
)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    expired bigint[];
begin
    if (select s.archives from postroom.settings s) then
        raise exception 'messages of this outbox are archived before they are removed, and no archive is given'
            using hint = 'configure [archive]; or end archiving with `update postroom.settings set archives = false`';
    end if;
    -- Nobody finishes these any more.
    delete from postroom.archive_segments;
    select e.seqs, e.last, e.more into expired, last, more
      from postroom.outbox_expired(retain_outbox.lane, retain_outbox.after, retain_outbox.patterns, retain_outbox.ages,
                                   retain_outbox.usual, retain_outbox.max) e;
    looked := cardinality(expired);
    delete from postroom.outbox o where o.lane = retain_outbox.lane and o.seq = any (expired);
    get diagnostics removed = row_count;
end
$$;

-- Writes down that these messages are about to leave for the archive, unless others are on their way. Returns the segment; null: nothing
-- of it is there any more, or another process was first.
create function postroom.archive_begin(lanes smallint[], seqs bigint[], taken_for interval) returns uuid
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    segment uuid := postroom.uuid_v7();
begin
    perform pg_advisory_xact_lock(8101821198351098728);
    if cardinality(archive_begin.seqs) > 100000 or exists (select from postroom.archive_segments g where not g.stored) then
        return null;
    end if;
    insert into postroom.archive_segments (id, lanes, seqs, ids, taken_until)
    select segment, array_agg(o.lane order by o.lane, o.seq), array_agg(o.seq order by o.lane, o.seq), array_agg(o.id order by o.lane, o.seq),
           clock_timestamp() + archive_begin.taken_for
      from unnest(archive_begin.lanes, archive_begin.seqs) w (lane, seq)
      join postroom.outbox o on o.lane = w.lane and o.seq = w.seq
     where o.id not in (select i.id from postroom.archive_segments g cross join unnest(g.ids) i (id))
     having count(*) > 0;
    if not found then
        return null;
    end if;
    update postroom.settings set archives = true where not archives;
    return segment;
end
$$;

-- Takes a segment that was begun and that no process is at.
create function postroom.archive_take(taken_for interval, out segment uuid, out stored boolean)
language sql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
    update postroom.archive_segments g
       set taken_until = clock_timestamp() + archive_take.taken_for
     where g.id = (select f.id from postroom.archive_segments f
                    where f.taken_until < clock_timestamp() order by f.begun_at limit 1 for update skip locked)
    returning g.id, g.stored
$$;

-- Removes the messages of a segment that the archive has. One that a route has to send once more, or for the first time, stays until it
-- has, and the segment with it. Returns how many were removed.
create function postroom.archive_end(segment uuid) returns bigint
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    g       postroom.archive_segments;
    removed bigint;
begin
    select * into g from postroom.archive_segments x where x.id = archive_end.segment for update;
    if not found then
        return 0;
    end if;
    with held as materialized (
        select n.lane from generate_series(0, (select s.lanes - 1 from postroom.settings s)) n (lane) where postroom.positions_hold(n.lane::smallint)
    )
    delete from postroom.outbox o
     using unnest(g.lanes, g.seqs, g.ids) w (lane, seq, id)
     where o.lane = w.lane and o.seq = w.seq and o.id = w.id and o.lane in (select h.lane from held h)
       and not exists (select from postroom.lanes l
                        where l.lane = o.lane
                          and not (o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot)))
       and not exists (select from postroom.routes r join postroom.parked p on p.route = r.name and p.seq = o.seq);
    get diagnostics removed = row_count;
    update postroom.settings set archived_segments = archived_segments + 1 where not g.stored;
    with rest as (
        select w.lane, w.seq, w.id from unnest(g.lanes, g.seqs, g.ids) w (lane, seq, id)
         where exists (select from postroom.outbox o where o.lane = w.lane and o.seq = w.seq and o.id = w.id)
    )
    update postroom.archive_segments x
       set stored = true,
           lanes = (select coalesce(array_agg(r.lane order by r.lane, r.seq), '{}') from rest r),
           seqs = (select coalesce(array_agg(r.seq order by r.lane, r.seq), '{}') from rest r),
           ids = (select coalesce(array_agg(r.id order by r.lane, r.seq), '{}') from rest r)
     where x.id = g.id;
    delete from postroom.archive_segments x where x.id = g.id and x.ids = '{}';
    return removed;
end
$$;

-- Puts messages that left for the archive back into their places, which every route has passed: nobody sends them unless they are
-- replayed, or a route begins with what is oldest. A message is not put back where a route has not passed its place (it would be sent as a
-- new one) or where the sequence has not come to, nor into the place of another message. Returns the ids that were put back, and how many
-- were here already, were ahead, or have no place.
create function postroom.archive_restore(
    seqs               bigint[],
    ids                uuid[],
    topics             text[],
    types              text[],
    payloads           bytea[],
    keys               text[],
    routing_keys       text[],
    content_types      text[],
    headers            text[],
    tenant_ids         text[],
    aggregate_types    text[],
    aggregate_ids      text[],
    aggregate_versions bigint[],
    occurred_us        bigint[], -- since 1970
    stays_for          interval,
    out restored uuid[],
    out present  bigint,
    out ahead    bigint,
    out taken    bigint
)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    lanes_ integer := (select s.lanes from postroom.settings s);
    drawn bigint := (select s.last_value - (not s.is_called)::int from postroom.outbox_seq_seq s);
begin
    -- No position moves back meanwhile, and no retention counts what is half here.
    perform pg_advisory_xact_lock(8102099357714966376);
    if postroom.positions_are_foreign() then
        raise exception 'the positions of routes are not those of this outbox' using
            hint = 'start a relay, which puts that right, and try again';
    end if;
    with given as materialized (
        select g.*, (abs(hashtextextended(coalesce(g.key, g.aggregate_id, g.id::text), 0) % lanes_))::smallint as lane
          from (select * from unnest(archive_restore.seqs, archive_restore.ids, archive_restore.topics, archive_restore.types,
                                     archive_restore.payloads, archive_restore.keys, archive_restore.routing_keys,
                                     archive_restore.content_types, archive_restore.headers, archive_restore.tenant_ids,
                                     archive_restore.aggregate_types, archive_restore.aggregate_ids, archive_restore.aggregate_versions,
                                     archive_restore.occurred_us)
                           as u (seq, id, topic, type, payload, key, routing_key, content_type, headers, tenant_id, aggregate_type,
                                 aggregate_id, aggregate_version, occurred_us)) g
    ),
    judged as materialized (
        select g.*,
               exists (select from postroom.outbox o where o.id = g.id) as is_here,
               g.seq > drawn or exists (select from postroom.lanes l where l.lane = g.lane and l.position_seq < g.seq) as is_ahead,
               exists (select from generate_series(0, lanes_ - 1) n (lane)
                         join postroom.outbox o on o.lane = n.lane and o.seq = g.seq where o.id <> g.id) as is_taken
          from given g
    ),
    put as (
        insert into postroom.outbox (xid, seq, occurred_at, aggregate_version, id, topic, type, payload, key, routing_key, content_type,
                                     headers, tenant_id, aggregate_type, aggregate_id)
        overriding system value
        -- Of a transaction that every snapshot sees.
        select '3'::xid8, j.seq, timestamptz '1970-01-01 00:00:00+00' + j.occurred_us * interval '1 microsecond', j.aggregate_version, j.id,
               j.topic, j.type, j.payload, j.key, j.routing_key, j.content_type, j.headers::json, j.tenant_id, j.aggregate_type, j.aggregate_id
          from judged j
         where not j.is_here and not j.is_ahead and not j.is_taken
            on conflict (id) do nothing
        returning lane, seq, id
    ),
    noted as (
        insert into postroom.archive_restored as r (id, lane, seq, stays_until)
        select p.id, p.lane, p.seq, clock_timestamp() + archive_restore.stays_for from put p
            on conflict (id) do update set lane = excluded.lane, seq = excluded.seq, stays_until = excluded.stays_until
    ),
    -- What came back before stays as long as what comes back now.
    kept as (
        update postroom.archive_restored r set stays_until = greatest(r.stays_until, clock_timestamp() + archive_restore.stays_for)
          from judged j where j.is_here and r.id = j.id
    )
    select (select coalesce(array_agg(p.id order by p.seq), '{}') from put p),
           count(*) filter (where j.is_here),
           count(*) filter (where not j.is_here and j.is_ahead),
           count(*) filter (where not j.is_here and not j.is_ahead and j.is_taken)
      into restored, present, ahead, taken
      from judged j;
end
$$;

revoke execute on function postroom.outbox_expired(smallint, bigint, text[], interval[], interval, integer),
                           postroom.positions_hold(smallint), postroom.archive_forget(integer),
                           postroom.archive_begin(smallint[], bigint[], interval), postroom.archive_take(interval), postroom.archive_end(uuid),
                           postroom.archive_restore(bigint[], uuid[], text[], text[], bytea[], text[], text[], text[], text[], text[], text[],
                                                    text[], bigint[], bigint[], interval)
    from public;
