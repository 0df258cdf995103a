-- As before, with weaker locks: two runs at once, or one beside a relay that reads, ended in a deadlock before. PostgreSQL breaks
-- one after a second, but not before its clock has caught up if that was set back meanwhile.
create or replace function postroom.mend() returns text
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
    -- One at a time: two would give the same new places.
    perform pg_advisory_xact_lock(hashtextextended('postroom.mend', 0));
    -- Taken before the sequence is read again: see checkpoint().
    perform pg_current_xact_id();
    if foreign_rows then
        -- Writers and relays are kept away, and readers are not: whoever reads has locks that he holds while he waits for more.
        -- A long transaction is waited for no longer than this, since new writers queue up behind us.
        perform set_config('lock_timeout', '2s', true);
        lock table postroom.lanes, postroom.outbox, postroom.settings in exclusive mode;
        perform set_config('lock_timeout', '0', true);
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
