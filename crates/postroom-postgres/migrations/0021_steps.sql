-- A time beyond year 9999 has no place in a calendar: lists, replays and ages fail over such a row, and a message that is to become visible at
-- 'infinity' is never sent. What is there already gets the nearest time that has one; this reads the outbox once and locks nothing but such rows.
update postroom.outbox
   set occurred_at = case when occurred_at = '-infinity' then timestamptz '0001-01-01 00:00:00+00' else timestamptz '9999-12-31 00:00:00+00' end
 where occurred_at >= timestamptz '10000-01-01 00:00:00+00' or occurred_at = '-infinity';
update postroom.parked
   set occurred_at = case when occurred_at = '-infinity' then timestamptz '0001-01-01 00:00:00+00' else timestamptz '9999-12-31 00:00:00+00' end
 where occurred_at >= timestamptz '10000-01-01 00:00:00+00' or occurred_at = '-infinity';
update postroom.dead_letters
   set occurred_at = case when occurred_at = '-infinity' then timestamptz '0001-01-01 00:00:00+00' else timestamptz '9999-12-31 00:00:00+00' end
 where occurred_at >= timestamptz '10000-01-01 00:00:00+00' or occurred_at = '-infinity';
alter table postroom.outbox
    add constraint outbox_occurred_at_is_a_time
        check (occurred_at > '-infinity' and occurred_at < timestamptz '10000-01-01 00:00:00+00') not valid,
    add constraint outbox_visible_at_comes check (visible_at < timestamptz '10000-01-01 00:00:00+00') not valid;

-- What waits comes and goes by the thousands, and autovacuum looks once a minute. With statistics of an empty table the planner takes any index, and
-- reads a route's whole queue for each key that it looks up. So relays call this with their renewals: tables that have become much larger than
-- their statistics say are analyzed, by a small sample. Where another process is at it, or holds a lock, it is left alone.
create function postroom.refresh_statistics() returns void
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set default_statistics_target = 10
as $$
declare
    name text;
begin
    for name in
        select c.relname from pg_class c
         where c.relnamespace = 'postroom'::regnamespace
           and c.relname in ('parked', 'dead_letters', 'blocked_keys', 'suspects', 'operation_watch', 'inbox_messages', 'dead_consume')
           and c.relkind = 'r'
           and pg_stat_get_live_tuples(c.oid) > 100 + 4 * greatest(c.reltuples, 0)
    loop
        execute format('analyze (skip_locked) postroom.%I', name);
    end loop;
end
$$;
revoke execute on function postroom.refresh_statistics() from public;

-- As before, and a clock that was ahead at the last step does not hold an operation up.
create or replace function postroom.operations_due(max integer) returns table (
    id uuid, kind text, side text, route text, filter jsonb, upto_seq bigint, cursor_seq bigint, may bigint
)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    o       postroom.operations;
    waiting bigint;
    failed  bigint;
begin
    for o in select * from postroom.operations x
              where x.ended_at is null
                and (x.state in ('running', 'cancelled') or exists (select from postroom.operation_watch w where w.operation = x.id))
              order by x.state = 'running' desc, x.created_at limit 200 for update skip locked
    loop
        with watched as materialized (
            select w.seq, w.message_id, w.cause from postroom.operation_watch w where w.operation = o.id order by w.seq limit operations_due.max
        ),
        ended as (
            -- What is gone from where it waited was published, or handled, unless it died or its route was forgotten.
            select w.seq, w.message_id,
                   case when w.cause is not null then w.cause
                        when o.side = 'out' then case when here.is then 'done' else 'removed' end
                        when exists (select from postroom.inbox i where i.consumer = o.route and i.message_id = w.message_id) then 'done'
                        else 'removed' end as outcome
              from watched w
             cross join (select exists (select from postroom.routes r where r.name = o.route) as is) here
             where case when o.side = 'out'
                        then not exists (select from postroom.parked p where p.route = o.route and p.seq = w.seq)
                        else not exists (select from postroom.inbox_messages m
                                          where m.consumer = o.route and m.message_id = w.message_id and m.state <> 'done') end
        ),
        gone as (
            delete from postroom.operation_watch w using ended j
             where w.operation = o.id and w.seq = j.seq and w.message_id = j.message_id
        )
        insert into postroom.operation_tallies as t (operation, outcome, messages)
        select o.id, j.outcome, count(*) from ended j group by j.outcome
            on conflict (operation, outcome) do update set messages = t.messages + excluded.messages;

        if o.state in ('running', 'paused', 'waiting') and o.side = 'out'
           and not exists (select from postroom.routes r where r.name = o.route) then
            update postroom.operations x set state = 'cancelled', note = 'the route is gone' where x.id = o.id;
            o.state := 'cancelled';
        end if;
        select count(*) into waiting from (select from postroom.operation_watch w where w.operation = o.id limit 10000) w;
        if o.state = 'cancelled' or o.read_all then
            if waiting = 0 then
                update postroom.operations x
                   set state = case when x.state = 'cancelled' then 'cancelled' else 'done' end, ended_at = clock_timestamp()
                 where x.id = o.id;
            end if;
            continue;
        end if;
        continue when o.state <> 'running';
        may := 500;
        if o.canary is not null and not o.canary_done then
            may := o.canary - o.released;
            if may <= 0 then
                continue when waiting > 0;
                select coalesce(sum(t.messages), 0) into failed
                  from postroom.operation_tallies t where t.operation = o.id and t.outcome <> 'done';
                update postroom.operations x
                   set canary_done = true, stepped_at = clock_timestamp(),
                       state = case when failed = 0 and x.goes_on then 'running' else 'waiting' end,
                       note = case when failed > 0 then format('%s of the %s canary messages failed', failed, o.released)
                                   when not x.goes_on then format('all %s canary messages went through', o.released) end
                 where x.id = o.id;
                continue;
            end if;
        elsif o.rate is not null then
            -- The clock was ahead at the last step, and is not any more.
            if o.stepped_at > clock_timestamp() + interval '2 seconds' then
                o.stepped_at := clock_timestamp();
                update postroom.operations x set stepped_at = o.stepped_at where x.id = o.id;
            end if;
            -- A pause is not caught up with.
            may := floor(o.rate * least(1, extract(epoch from clock_timestamp() - o.stepped_at)));
        end if;
        -- What is not taken away is not added to.
        may := least(may, 500, greatest(0, 2000 - waiting));
        if may > 0 then
            id := o.id; kind := o.kind; side := o.side; route := o.route; filter := o.filter; upto_seq := o.upto_seq; cursor_seq := o.cursor_seq;
            return next;
        end if;
    end loop;
end
$$;

-- As before, and cheaper. What is replayed is put in as the head of its key, or behind it, so that no row has to be changed again; a step
-- reads the part of each lane that it is about once, instead of looking for each seq in each lane. The rate is reached, not only not exceeded.
--
-- Does one step of an operation: gives these messages out again, or gives dead letters back, or deletes them. `seqs` were chosen by the
-- operation's filter from what is behind `from_seq`, in their order; everything up to `to_seq` was looked at, and with `all_read` there is
-- nothing behind it. Nothing, and null, if the operation has been moved on by another process, or does not run any more.
create or replace function postroom.operation_step(op uuid, seqs bigint[], from_seq bigint, to_seq bigint, all_read boolean) returns bigint
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
-- Without sorts, only the index by key and seq gives the first of a key, whatever the statistics say.
set enable_sort = off
as $$
#variable_conflict use_variable
declare
    o      postroom.operations;
    given  bigint := 0;
    ids    uuid[] := '{}';
    keys   text[] := '{}';
    top    bigint := (select max(s) from unnest(operation_step.seqs) s);
    head   bigint;
begin
    select * into o from postroom.operations x
     where x.id = operation_step.op and x.state = 'running' and x.cursor_seq = operation_step.from_seq and not x.read_all
       for update skip locked;
    if not found or cardinality(operation_step.seqs) > 1000 then
        return null;
    end if;
    if cardinality(operation_step.seqs) > 0 and o.side = 'out' then
        -- What relays record about the same keys comes wholly before this or wholly after it.
        perform from postroom.lanes l where l.route = o.route order by l.lane for update;
    end if;
    if o.kind = 'replay' then
        with finished as (
            select b.*
              from postroom.lanes l
              -- No condition for an index: it would mean a look-up for each seq in each lane.
              join postroom.outbox b on b.lane = l.lane and b.seq > operation_step.from_seq and b.seq <= top
                                    and b.seq + 0 = any (operation_step.seqs)
             where l.route = o.route
               and b.seq <= l.position_seq and pg_visible_in_snapshot(b.xid, l.position_snapshot)
               and not exists (select from postroom.parked p where p.route = o.route and p.seq = b.seq)
               and not exists (select from postroom.dead_letters d where d.route = o.route and d.seq = b.seq)
             order by b.seq
        ),
        again as materialized (
            select f.*, coalesce(f.key, f.aggregate_id) as ordering_key,
                   case when o.place = 'behind' or o.new_ids then nextval('postroom.replay_seq') else f.seq end as place,
                   case when o.new_ids then postroom.uuid_v7() else f.id end as new_id
              from (select * from finished order by seq) f
        ),
        put as (
            insert into postroom.parked (route, seq, lane, ordering_key, state, due_at, waits_since, id, topic, type, payload, key, routing_key,
                                         content_type, headers, tenant_id, aggregate_type, aggregate_id, aggregate_version, occurred_at)
            select o.route, place, lane, ordering_key,
                   -- The first of its key can be claimed. There is one before it if there is a head, since lanes are locked.
                   case when ordering_key is null then 'retry'
                        when row_number() over (partition by ordering_key order by place) > 1 then 'queued'
                        when (select p.seq from postroom.parked p
                               where p.route = o.route and p.ordering_key >= again.ordering_key and p.ordering_key <= again.ordering_key
                                 and p.state <> 'scheduled'
                               order by p.ordering_key, p.seq limit 1) < place then 'queued'
                        else 'retry' end,
                   clock_timestamp(), clock_timestamp(), new_id, topic, type, payload, key, routing_key, content_type,
                   -- Text, since jsonb would change what was written.
                   case when not o.new_ids then headers
                        when headers is null or headers::text ~ '^\s*\{\s*\}\s*$' then json_build_object('postroom-replay-of', id)
                        else (format('{"postroom-replay-of":"%s",', id) || substr(ltrim(headers::text, E' \t\n\r'), 2))::json end,
                   tenant_id, aggregate_type,
                   aggregate_id, aggregate_version, occurred_at
              from again
                on conflict (route, seq) do nothing
            returning seq, id, ordering_key
        ),
        watch as (
            insert into postroom.operation_watch (operation, seq, message_id) select o.id, p.seq, p.id from put p
        )
        select count(*), coalesce(array_agg(p.id order by p.seq), '{}') into given, ids from put p;
    elsif o.kind = 'retry' and o.side = 'out' then
        with gone as (
            delete from postroom.dead_letters d where d.route = o.route and d.seq = any (operation_step.seqs) returning d.*
        ),
        freed as (
            delete from postroom.blocked_keys b where b.route = o.route and b.seq = any (operation_step.seqs)
        ),
        put as (
            insert into postroom.parked (route, seq, lane, ordering_key, state, due_at, waits_since, last_error, history, id, topic, type, payload, key,
                                         routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id, aggregate_version,
                                         occurred_at)
            select route, seq, lane, coalesce(key, aggregate_id), case when coalesce(key, aggregate_id) is null then 'retry' else 'queued' end,
                   clock_timestamp(), clock_timestamp(), error, history, id, topic, type, payload, key, routing_key, content_type, headers, tenant_id,
                   aggregate_type, aggregate_id, aggregate_version, occurred_at
              from gone
                on conflict (route, seq) do nothing
            returning seq, id, ordering_key
        ),
        watch as (
            insert into postroom.operation_watch (operation, seq, message_id) select o.id, p.seq, p.id from put p
        )
        select count(*), coalesce(array_agg(p.id order by p.seq), '{}'), coalesce(array_agg(distinct p.ordering_key) filter (where p.ordering_key is not null), '{}')
          into given, ids, keys from put p;
    elsif o.kind = 'retry' then
        with gone as (
            delete from postroom.dead_consume d where d.consumer = o.route and d.seq = any (operation_step.seqs) returning d.*
        ),
        put as (
            insert into postroom.inbox_messages as m
                   (consumer, message_id, ordering_key, last_error, history, topic, type, payload, key, routing_key, content_type, headers,
                    tenant_id, aggregate_type, aggregate_id, aggregate_version, occurred_at)
            select consumer, message_id, ordering_key, error, history, topic, type, payload, key, routing_key, content_type, headers,
                   tenant_id, aggregate_type, aggregate_id,
                   -- A message of somebody else's may have names that are too long for the index by version.
                   case when octet_length(aggregate_type) <= 255 and octet_length(aggregate_id) <= 512 then aggregate_version end, occurred_at
              from gone order by seq
                -- Its row may still wait to be swept away.
                on conflict (consumer, message_id) do update
                   set state = 'new', seq = default, window_over = false, claimed_by = null, due_at = clock_timestamp(), attempts = 0,
                       claims = 0, payload = excluded.payload,
                       last_error = excluded.last_error, history = excluded.history
                 where m.state = 'done'
            returning seq, message_id
        ),
        watch as (
            insert into postroom.operation_watch (operation, seq, message_id) select o.id, p.seq, p.message_id from put p
        )
        select count(*), coalesce(array_agg(p.message_id order by p.seq), '{}') into given, ids from put p;
    elsif o.side = 'out' then
        -- One that its lane's position has not passed would come back after a crash.
        with gone as (
            delete from postroom.dead_letters d
             where d.route = o.route and d.seq = any (operation_step.seqs)
               and not exists (
                       select from postroom.outbox b join postroom.lanes l on l.lane = b.lane
                        where b.lane = d.lane and b.seq = d.seq and l.route = d.route
                          and not (b.seq <= l.position_seq and pg_visible_in_snapshot(b.xid, l.position_snapshot)))
            returning d.seq, d.id
        ),
        freed as (
            delete from postroom.blocked_keys b using gone g where b.route = o.route and b.seq = g.seq
        )
        select count(*), coalesce(array_agg(g.id order by g.seq), '{}') into given, ids from gone g;
    else
        with gone as (
            delete from postroom.dead_consume d where d.consumer = o.route and d.seq = any (operation_step.seqs)
            returning d.seq, d.message_id
        )
        select count(*), coalesce(array_agg(g.message_id order by g.seq), '{}') into given, ids from gone g;
    end if;
    if cardinality(keys) > 0 then
        -- One by one: with statistics of an empty table a join may read the whole of it for each key.
        for head in
            select (select p.seq from postroom.parked p
                     where p.route = o.route and p.ordering_key >= k.ordering_key and p.ordering_key <= k.ordering_key
                       and p.state <> 'scheduled'
                     order by p.ordering_key, p.seq limit 1)
              from unnest(keys) k (ordering_key)
        loop
            update postroom.parked q set state = 'retry', due_at = clock_timestamp(), waits_since = clock_timestamp()
             where q.route = o.route and q.seq = head and q.state = 'queued';
        end loop;
    end if;
    if given > 0 then
        insert into postroom.audit (actor, action, reason, filter, message_ids)
        values (o.actor,
                case when o.kind = 'replay' then 'replay'
                     when o.side = 'out' then 'dead.' || o.kind else 'inbox.' || o.kind end,
                o.reason, jsonb_build_object('operation', o.id), ids);
        if o.kind = 'discard' then
            insert into postroom.operation_tallies as t (operation, outcome, messages) values (o.id, 'done', given)
                on conflict (operation, outcome) do update set messages = t.messages + excluded.messages;
        end if;
    end if;
    update postroom.operations x
       set released = x.released + given, skipped = x.skipped + cardinality(operation_step.seqs) - given,
           cursor_seq = operation_step.to_seq, read_all = operation_step.all_read,
           -- What was given out is paid with its share of a second, so that the time of a step itself costs no rate; not with more than one
           -- second that was saved up.
           stepped_at = case when given = 0 then x.stepped_at
                             when x.rate is null then clock_timestamp()
                             else least(clock_timestamp() + interval '1 second',
                                        greatest(x.stepped_at, clock_timestamp() - interval '1 second') + given * interval '1 second' / x.rate)
                        end
     where x.id = o.id;
    return given;
end
$$;
