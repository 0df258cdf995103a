-- Retention: removes what is finished and old, in bounded steps. Each function checks for itself that what it removes is finished, so
-- that its caller needs no right to delete anything.

alter table postroom.audit drop constraint audit_action_check;
alter table postroom.audit add constraint audit_action_check check (action in
    ('dead.retry', 'dead.discard', 'dead.expire', 'key.park', 'key.unpark', 'key.skip', 'inbox.retry', 'inbox.discard', 'inbox.expire',
     'inbox.prune', 'audit.expire', 'route.set', 'route.forget'));

-- Removes rows of one lane of the outbox, of those after `after` and at most `max` of them, in the order of their seqs: rows that every
-- route has passed, that are not parked, of a topic that some route took when they were written, and that are older than the age for
-- their topic. `patterns` and `ages` are parallel: the first pattern that fits gives the age, a null age means for ever, and where none
-- fits it is `usual`. Returns how many rows were removed and looked at, the last seq that was looked at, and whether rows behind it may
-- be old enough. Removes nothing while the positions may not be those of this table (a restore, a sequence that went back): a relay puts
-- that right.
create function postroom.retain_outbox(
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
    now_     timestamptz := clock_timestamp();
    -- What is younger than this is kept, whatever its topic.
    shortest interval := (select min(a.age) from unnest(retain_outbox.ages || retain_outbox.usual) a (age));
    passed   bigint := (select min(l.position_seq) from postroom.lanes l where l.lane = retain_outbox.lane);
    -- How far the sequence has come, and how far it must have come if it never went back.
    drawn    bigint := (select s.last_value - (not s.is_called)::int from postroom.outbox_seq_seq s);
    known    bigint := greatest((select max(greatest(l.position_seq, l.floor_seq, l.catch_up_seq)) from postroom.lanes l),
                                (select max(o.seq) from postroom.outbox o where o.lane = retain_outbox.lane));
    any_old  boolean;
begin
    removed := 0;
    looked := 0;
    last := retain_outbox.after;
    more := false;
    if shortest is null or passed is null or passed <= retain_outbox.after then
        return;
    end if;
    if shortest < interval '1 minute' then
        raise exception 'postroom.retain_outbox: % is too short; a minute is the least', shortest
            using errcode = 'invalid_parameter_value';
    end if;
    if postroom.positions_are_foreign() or drawn < known then
        return;
    end if;
    -- A route without a position in this lane has passed nothing of it.
    if exists (select from postroom.routes r
                where not exists (select from postroom.lanes l where l.route = r.name and l.lane = retain_outbox.lane)) then
        return;
    end if;
    with looked_at as materialized (
        select o.seq, o.xid, o.topic, o.occurred_at
          from postroom.outbox o
         where o.lane = retain_outbox.lane and o.seq > retain_outbox.after and o.seq <= passed
         order by o.seq limit retain_outbox.max
    ),
    finished as (
        select k.seq
          from looked_at k
         cross join lateral (
             select case when exists (select from unnest(retain_outbox.patterns) p
                                       where k.topic = p or (p like '%*' and starts_with(k.topic, left(p, -1))))
                         then (select a.age from unnest(retain_outbox.patterns, retain_outbox.ages) with ordinality as a (pattern, age, place)
                                where k.topic = a.pattern or (a.pattern like '%*' and starts_with(k.topic, left(a.pattern, -1)))
                                order by a.place limit 1)
                         else retain_outbox.usual end as age) a
         where k.occurred_at < now_ - a.age
           and not exists (select from postroom.lanes l
                            where l.lane = retain_outbox.lane
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
    ),
    gone as (
        delete from postroom.outbox o using finished f where o.lane = retain_outbox.lane and o.seq = f.seq returning 1
    )
    select (select count(*) from gone), count(*), coalesce(max(k.seq), retain_outbox.after), coalesce(bool_or(k.occurred_at < now_ - shortest), false)
      into removed, looked, last, any_old
      from looked_at k;
    more := looked = retain_outbox.max and any_old;
end
$$;

-- Removes dead letters of both sides that died longer ago, at most `max`, with one audit row that names them. One that blocks its key stays,
-- and so does one that its route has not passed: a crash would bring it back.
create function postroom.retain_dead(older_than interval, max integer) returns bigint
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    oldest timestamptz := clock_timestamp() - retain_dead.older_than;
    ids    uuid[];
    others uuid[];
begin
    if retain_dead.older_than < interval '1 day' then
        raise exception 'postroom.retain_dead: % is too short; a day is the least', retain_dead.older_than
            using errcode = 'invalid_parameter_value';
    end if;
    with old as (
        select d.route, d.seq from postroom.dead_letters d
         where d.died_at < oldest
           and not exists (select from postroom.blocked_keys b where b.route = d.route and b.seq = d.seq)
           and not exists (
                   select from postroom.outbox o join postroom.lanes l on l.lane = o.lane
                    where o.lane = d.lane and o.seq = d.seq and l.route = d.route
                      and not (o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot)))
         limit retain_dead.max
    ), gone as (
        delete from postroom.dead_letters d using old where d.route = old.route and d.seq = old.seq returning d.id
    )
    select coalesce(array_agg(g.id), '{}') into ids from gone g;
    with old as (
        select d.consumer, d.message_id from postroom.dead_consume d
         where d.died_at < oldest limit greatest(retain_dead.max - cardinality(ids), 0)
    ), gone as (
        delete from postroom.dead_consume d using old where d.consumer = old.consumer and d.message_id = old.message_id
        returning d.message_id
    )
    select coalesce(array_agg(g.message_id), '{}') into others from gone g;
    if cardinality(ids) + cardinality(others) > 0 then
        insert into postroom.audit (actor, action, reason, filter, message_ids)
        select 'retention', a.action, 'older than ' || retain_dead.older_than, jsonb_build_object('older_than', retain_dead.older_than), a.ids
          from (values ('dead.expire', ids), ('inbox.expire', others)) a (action, ids)
         where a.ids <> '{}';
    end if;
    return cardinality(ids) + cardinality(others);
end
$$;

-- Forgets what consumers processed longer ago, at most `max` rows; see inbox_prune.
create function postroom.retain_inbox(older_than interval, max integer) returns bigint
language sql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$ select postroom.inbox_prune(retain_inbox.older_than, retain_inbox.max) $$;

-- Removes audit rows that are older, at most `max`; what was removed last, and until when, stands in the audit table itself.
create function postroom.retain_audit(older_than interval, max integer) returns bigint
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    oldest  timestamptz := clock_timestamp() - retain_audit.older_than;
    removed bigint;
begin
    if retain_audit.older_than < interval '30 days' then
        raise exception 'postroom.retain_audit: % is too short; 30 days is the least', retain_audit.older_than
            using errcode = 'invalid_parameter_value';
    end if;
    with gone as (
        delete from postroom.audit a
         where a.id in (select o.id from postroom.audit o where o.at < oldest order by o.id limit retain_audit.max) returning 1
    )
    select count(*) into removed from gone;
    if removed > 0 then
        insert into postroom.audit (actor, action, reason, filter, message_ids)
        values ('retention', 'audit.expire', 'older than ' || retain_audit.older_than,
                jsonb_build_object('older_than', retain_audit.older_than, 'rows', removed, 'before', oldest), '{}');
    end if;
    return removed;
end
$$;

revoke execute on function postroom.retain_outbox(smallint, bigint, text[], interval[], interval, integer) from public;
revoke execute on function postroom.retain_dead(interval, integer) from public;
revoke execute on function postroom.retain_inbox(interval, integer) from public;
revoke execute on function postroom.retain_audit(interval, integer) from public;
