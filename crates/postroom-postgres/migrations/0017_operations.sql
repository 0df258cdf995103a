-- Operations: something that is done to many messages, step by step, by whichever relay process is there. A replay of messages that were
-- sent, a retry of dead letters, or their removal. Each step is one transaction that says in postroom.audit which messages it was about.

alter table postroom.audit drop constraint audit_action_check;
alter table postroom.audit add constraint audit_action_check check (action in
    ('dead.retry', 'dead.discard', 'dead.expire', 'dead.note', 'key.park', 'key.unpark', 'key.skip', 'inbox.retry', 'inbox.discard',
     'inbox.expire', 'inbox.prune', 'audit.expire', 'route.set', 'route.forget', 'replay', 'operation.begin', 'operation.pause',
     'operation.resume', 'operation.cancel'));

create table postroom.operations (
    id          uuid        primary key,
    kind        text        not null check (kind in ('replay', 'retry', 'discard')),
    side        text        not null check (side in ('out', 'in')),
    route       text        not null, -- for side in: the consumer
    filter      jsonb       not null,
    -- Nothing behind this seq: what is written later is not meant.
    upto_seq    bigint      not null,
    planned     bigint,                             -- matched when it began
    canary      integer     check (canary > 0),
    goes_on     boolean     not null default false, -- after a canary of which none failed, without being told
    rate        integer     check (rate > 0),       -- messages a second
    place       text        not null default 'before' check (place in ('before', 'behind')),
    new_ids     boolean     not null default false,
    state       text        not null default 'running' check (state in ('running', 'waiting', 'paused', 'done', 'cancelled')),
    note        text,                               -- what it waits for
    canary_done boolean     not null default false,
    -- Everything up to here was looked at, and whether that was all.
    cursor_seq  bigint      not null default 0,
    read_all    boolean     not null default false,
    released    bigint      not null default 0,
    skipped     bigint      not null default 0,     -- matched, but is not finished, or is dead
    actor       text        not null,
    reason      text        not null,
    db_role     text        not null default session_user,
    created_at  timestamptz not null default clock_timestamp(),
    stepped_at  timestamptz not null default clock_timestamp(),
    ended_at    timestamptz
);
create index operations_open on postroom.operations (created_at) where ended_at is null;

-- What was given to a relay or consumer and has no outcome yet.
create table postroom.operation_watch (
    operation  uuid   not null,
    seq        bigint not null,
    message_id uuid   not null,
    cause      text,           -- it became a dead letter meanwhile
    primary key (operation, seq, message_id)
);
create index operation_watch_message on postroom.operation_watch (message_id);

-- Notes on what is watched that it became a dead letter: whoever removes the letter later does not make it published or handled.
create function postroom.note_death() returns trigger
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update postroom.operation_watch w set cause = new.cause
      from postroom.operations o
     where w.message_id = new.id and o.id = w.operation and o.side = 'out' and o.route = new.route and w.seq = new.seq;
    return null;
end
$$;
create function postroom.note_death_in() returns trigger
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update postroom.operation_watch w set cause = new.cause
      from postroom.operations o
     where w.message_id = new.message_id and o.id = w.operation and o.side = 'in' and o.route = new.consumer;
    return null;
end
$$;
create trigger note_death after insert on postroom.dead_letters for each row execute function postroom.note_death();
create trigger note_death after insert on postroom.dead_consume for each row execute function postroom.note_death_in();

-- The outcomes of what was given: published or handled, dead by cause, or removed by an operator.
create table postroom.operation_tallies (
    operation uuid   not null,
    outcome   text   not null check (outcome in ('done', 'exhausted', 'permanent', 'poison', 'removed')),
    messages  bigint not null,
    primary key (operation, outcome)
);

-- Places of replayed messages that go behind the others of their key, or have new ids: no row of the outbox has such a seq, whatever
-- becomes of its sequence.
create sequence postroom.replay_seq minvalue 4611686018427387904 start 4611686018427387904;

-- As before, but for those places, which say nothing of how far the sequence of the outbox has come.
create or replace function postroom.seqs_astray(out last bigint, out top bigint, out since timestamptz)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    newest bigint := (select max(o.seq) from postroom.outbox o);
begin
    select case when s.is_called then s.last_value else s.last_value - 1 end into last from postroom.outbox_seq_seq s;
    select greatest(last, newest, (select max(greatest(l.position_seq, l.floor_seq, l.catch_up_seq)) from postroom.lanes l),
                    (select max(p.seq) from postroom.parked p where p.seq < 4611686018427387904),
                    (select max(d.seq) from postroom.dead_letters d where d.seq < 4611686018427387904))
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

-- What people say about groups of dead letters.
create table postroom.dead_notes (
    dead_group text        not null,
    at         timestamptz not null default clock_timestamp(),
    actor      text        not null,
    note       text        not null,
    primary key (dead_group, at)
);

-- Looks what became of messages that operations gave out, at most `max` of each, and moves the operations on. Returns those that go on,
-- and how many messages each may give out now. One process at a time has an operation.
create function postroom.operations_due(max integer) returns table (
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

-- Does one step of an operation: gives these messages out again, or gives dead letters back, or deletes them. `seqs` were chosen by the
-- operation's filter from what is behind `from_seq`, in their order; everything up to `to_seq` was looked at, and with `all_read` there is
-- nothing behind it. Nothing, and null, if the operation has been moved on by another process, or does not run any more.
create function postroom.operation_step(op uuid, seqs bigint[], from_seq bigint, to_seq bigint, all_read boolean) returns bigint
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    o      postroom.operations;
    given  bigint := 0;
    ids    uuid[] := '{}';
    keys   text[] := '{}';
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
              join postroom.outbox b on b.lane = l.lane and b.seq = any (operation_step.seqs)
             where l.route = o.route
               and b.seq <= l.position_seq and pg_visible_in_snapshot(b.xid, l.position_snapshot)
               and not exists (select from postroom.parked p where p.route = o.route and p.seq = b.seq)
               and not exists (select from postroom.dead_letters d where d.route = o.route and d.seq = b.seq)
             order by b.seq
        ),
        again as materialized (
            select f.*, case when o.place = 'behind' or o.new_ids then nextval('postroom.replay_seq') else f.seq end as place,
                   case when o.new_ids then postroom.uuid_v7() else f.id end as new_id
              from (select * from finished order by seq) f
        ),
        put as (
            insert into postroom.parked (route, seq, lane, ordering_key, state, due_at, id, topic, type, payload, key, routing_key,
                                         content_type, headers, tenant_id, aggregate_type, aggregate_id, aggregate_version, occurred_at)
            select o.route, place, lane, coalesce(key, aggregate_id), case when coalesce(key, aggregate_id) is null then 'retry' else 'queued' end,
                   clock_timestamp(), new_id, topic, type, payload, key, routing_key, content_type,
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
        select count(*), coalesce(array_agg(p.id order by p.seq), '{}'), coalesce(array_agg(distinct p.ordering_key) filter (where p.ordering_key is not null), '{}')
          into given, ids, keys from put p;
    elsif o.kind = 'retry' and o.side = 'out' then
        with gone as (
            delete from postroom.dead_letters d where d.route = o.route and d.seq = any (operation_step.seqs) returning d.*
        ),
        freed as (
            delete from postroom.blocked_keys b where b.route = o.route and b.seq = any (operation_step.seqs)
        ),
        put as (
            insert into postroom.parked (route, seq, lane, ordering_key, state, due_at, last_error, history, id, topic, type, payload, key,
                                         routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id, aggregate_version,
                                         occurred_at)
            select route, seq, lane, coalesce(key, aggregate_id), case when coalesce(key, aggregate_id) is null then 'retry' else 'queued' end,
                   clock_timestamp(), error, history, id, topic, type, payload, key, routing_key, content_type, headers, tenant_id,
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
        update postroom.parked q
           set state = 'retry', due_at = clock_timestamp()
          from unnest(keys) k (ordering_key)
         where q.route = o.route and q.state = 'queued'
           and q.seq = (select p.seq from postroom.parked p
                         where p.route = o.route and p.ordering_key = k.ordering_key and p.state <> 'scheduled'
                         order by p.seq limit 1);
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
           stepped_at = case when cardinality(operation_step.seqs) > 0 then clock_timestamp() else x.stepped_at end
     where x.id = o.id;
    return given;
end
$$;
revoke execute on function postroom.note_death(), postroom.note_death_in(), postroom.operations_due(integer), postroom.operation_step(uuid, bigint[], bigint, bigint, boolean) from public;
