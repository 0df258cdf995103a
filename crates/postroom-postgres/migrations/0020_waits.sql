-- Since when a message that a consumer kept waits, by the clock of that moment: a wait that was noted with a clock that was ahead
-- shows by it. What the last take saw of the clock does not tell: it may have gone forth and back between two takes, and messages
-- behind others of their key were not looked at. `inbox_clocks` now says when waits were looked at last.
alter table postroom.inbox_messages add column waits_since timestamptz;

-- As before, and it sees waits that were noted with a clock that was ahead.
create or replace function postroom.inbox_take(
    consumer   text,
    max        integer  default 1,
    owner      text     default 'anybody',
    lease      interval default '30 seconds',
    claims_max integer  default 10
) returns setof postroom.inbox_messages
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    moment timestamptz;
    looked timestamptz;
begin
    if inbox_take.max not between 1 and 10000 then
        raise exception 'postroom.inbox_take: max is %, it wants 1 to 10000', inbox_take.max using errcode = 'invalid_parameter_value';
    end if;
    if inbox_take.lease < interval '1 second' then
        raise exception 'postroom.inbox_take: a lease of % is too short; it wants a second or more', inbox_take.lease
            using errcode = 'invalid_parameter_value';
    end if;
    perform pg_advisory_xact_lock(hashtextextended('postroom.inbox_take ' || inbox_take.consumer, 0));
    moment := clock_timestamp();

    -- The clock was ahead when some waits were noted, and is not any more: they wait from now on, no longer than they were to
    -- wait then. Looked at every five seconds, and at once when the clock is behind the last look.
    select c.at into looked from postroom.inbox_clocks c where c.consumer = inbox_take.consumer;
    if looked is null or looked not between moment - interval '5 seconds' and moment then
        -- What has no such time was written by an older program: the last look is as good. Whoever holds a row has just changed it.
        update postroom.inbox_messages m
           set due_at = moment + (m.due_at - coalesce(m.waits_since, looked)), waits_since = moment
         where m.consumer = inbox_take.consumer and m.message_id in (
               select w.message_id from postroom.inbox_messages w
                where w.consumer = inbox_take.consumer and w.state in ('ready', 'claimed', 'early') and w.due_at > moment
                  and coalesce(w.waits_since, looked) > moment + interval '2 seconds'
                  for update skip locked);
        insert into postroom.inbox_clocks as c (consumer, at) values (inbox_take.consumer, moment)
            on conflict on constraint inbox_clocks_pkey do update set at = excluded.at;
    end if;

    -- Claims that killed everybody who had them.
    with lapsed as (
        select m.message_id from postroom.inbox_messages m
         where m.consumer = inbox_take.consumer and m.state in ('ready', 'claimed', 'early') and m.state = 'claimed'
           and m.due_at <= moment and m.claims >= inbox_take.claims_max
         order by m.due_at, m.seq limit 100 for update skip locked
    ), gone as (
        update postroom.inbox_messages m set state = 'done', payload = '' from lapsed l
         where m.consumer = inbox_take.consumer and m.message_id = l.message_id
        returning m.message_id
    )
    insert into postroom.dead_consume
    select m.consumer, m.message_id, m.seq, m.attempts, 'poison',
           format('%s claims in a row ended without a word: whoever had it died or hung', m.claims), m.history, moment,
           m.ordering_key, m.topic, m.type, m.payload, m.key, m.routing_key, m.content_type, m.headers, m.tenant_id,
           m.aggregate_type, m.aggregate_id, m.aggregate_version, m.occurred_at
      from postroom.inbox_messages m join gone g on m.consumer = inbox_take.consumer and m.message_id = g.message_id
        on conflict do nothing;

    -- What is finished or set aside lets the next of its key be examined. So does what is new: it may have been set aside, and
    -- let go before any take saw it.
    with finished as (
        select m.message_id, m.ordering_key, m.state from postroom.inbox_messages m
         where m.consumer = inbox_take.consumer and m.state in ('new', 'aside', 'done') and m.state <> 'new'
         order by m.state, m.seq limit 2000 for update skip locked
    ), deleted as (
        delete from postroom.inbox_messages m using finished f
         where m.consumer = inbox_take.consumer and m.message_id = f.message_id and f.state = 'done'
    ), early as (
        update postroom.inbox_messages m set state = 'early' from finished f
         where m.consumer = inbox_take.consumer and m.message_id = f.message_id and f.state = 'aside'
    )
    update postroom.inbox_messages m set state = 'new'
      from (select ordering_key from finished where ordering_key is not null
             union
            (select n.ordering_key from postroom.inbox_messages n
              where n.consumer = inbox_take.consumer and n.state = 'new' and n.state in ('new', 'aside', 'done')
                and n.ordering_key is not null
              order by n.seq limit 2000)) f
     cross join lateral (
           select n.message_id from postroom.inbox_messages n
            where n.consumer = inbox_take.consumer and n.ordering_key = f.ordering_key
              and n.state in ('new', 'ready', 'behind', 'claimed')
            order by n.seq limit 1) n
     where m.consumer = inbox_take.consumer and m.message_id = n.message_id and m.state = 'behind';

    -- What is new is ready, unless another of its key is before it or in work. It never waits, whatever the clock said when it came.
    update postroom.inbox_messages m
       set due_at = least(m.due_at, moment), state = case when m.ordering_key is not null and exists (
                     select from postroom.inbox_messages e
                      where e.consumer = m.consumer and e.ordering_key = m.ordering_key
                        and e.state in ('new', 'ready', 'behind', 'claimed') and e.message_id <> m.message_id
                        and (e.seq < m.seq or e.state in ('ready', 'claimed')))
                   then 'behind' else 'ready' end
     where m.consumer = inbox_take.consumer
       and m.message_id in (select n.message_id from postroom.inbox_messages n
                             where n.consumer = inbox_take.consumer and n.state = 'new' and n.state in ('new', 'aside', 'done')
                             order by n.seq limit 2000 for update skip locked);

    return query
    with due as (
        select m.message_id from postroom.inbox_messages m
         where m.consumer = inbox_take.consumer and m.state in ('ready', 'claimed', 'early') and m.due_at <= moment
           -- Of the early versions of an aggregate whose window is over, the lowest: it tells what is missing.
           and (m.state <> 'early' or not exists (
                select from postroom.inbox_messages e
                 where e.consumer = m.consumer and e.aggregate_type = m.aggregate_type and e.aggregate_id = m.aggregate_id
                   and e.aggregate_version < m.aggregate_version and e.aggregate_version is not null
                   and e.state = 'early' and e.due_at <= moment))
         order by m.due_at, m.seq limit inbox_take.max for update skip locked
    ), taken as (
        update postroom.inbox_messages m
           set state = 'claimed', claim = nextval('postroom.inbox_claims'), claims = m.claims + 1,
               claimed_by = inbox_take.owner, due_at = moment + inbox_take.lease, waits_since = moment,
               window_over = m.window_over or m.state = 'early'
          from due
         where m.consumer = inbox_take.consumer and m.message_id = due.message_id
        returning m.*
    )
    select * from taken order by seq;
end
$$;

-- As before, and they note since when.
create or replace function postroom.inbox_renew(consumer text, owner text, lease interval default '30 seconds') returns bigint
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    with renewed as (
        update postroom.inbox_messages m set due_at = clock_timestamp() + inbox_renew.lease, waits_since = clock_timestamp()
         where m.consumer = inbox_renew.consumer and m.claimed_by = inbox_renew.owner and m.state = 'claimed'
        returning 1
    )
    select count(*) from renewed
$$;

create or replace function postroom.inbox_fail(
    consumer     text,
    message_id   uuid,
    claim        bigint,
    error        text,
    retry_after  interval default null,
    attempts_max integer  default 8,
    give_up      boolean  default false
) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    burned integer;
    dead   boolean;
begin
    select m.attempts + 1 into burned from postroom.inbox_messages m
     where m.consumer = inbox_fail.consumer and m.message_id = inbox_fail.message_id
       and m.claim = inbox_fail.claim and m.state = 'claimed'
       for update;
    if not found then
        raise exception 'postroom.inbox_fail: claim % of message % has lapsed', inbox_fail.claim, inbox_fail.message_id
            using errcode = 'object_not_in_prerequisite_state', hint = 'somebody else has the message; nothing is to be done';
    end if;
    dead := inbox_fail.give_up or burned >= inbox_fail.attempts_max;
    if dead then
        perform postroom.inbox_bury(inbox_fail.consumer, inbox_fail.message_id, burned,
                                    case when inbox_fail.give_up then 'permanent' else 'exhausted' end, inbox_fail.error);
    else
        update postroom.inbox_messages m
           set state = 'ready', attempts = burned, claims = 0, claimed_by = null, last_error = inbox_fail.error,
               history = postroom.failure_noted(m.history, burned, inbox_fail.error),
               waits_since = clock_timestamp(),
               due_at = clock_timestamp() + coalesce(inbox_fail.retry_after,
                   (least(300, power(3, least(burned, 20))) + random() * 2.5) * interval '1 second')
         where m.consumer = inbox_fail.consumer and m.message_id = inbox_fail.message_id;
    end if;
    return dead;
end
$$;

-- As before. A duplicate writes nothing, and a commit that wrote nothing waits for no standby; but what it repeats may be of a commit
-- whose wait was cut short, which is visible here and not at the standby. A few bytes of log make the caller's commit wait for it.
create or replace function postroom.inbox_admit(consumer text, message_id uuid) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    insert into postroom.inbox (consumer, message_id) values (inbox_admit.consumer, inbox_admit.message_id)
        on conflict do nothing;
    if found then
        return true;
    end if;
    perform pg_logical_emit_message(true, 'postroom', ''::text);
    return false;
end
$$;

create or replace function postroom.inbox_admit_many(consumer text, message_ids uuid[]) returns setof uuid
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    new bigint;
begin
    return query
    insert into postroom.inbox (consumer, message_id)
    select inbox_admit_many.consumer, id from unnest(inbox_admit_many.message_ids) id order by id -- one order for all, so that none deadlock
        on conflict do nothing
    returning inbox.message_id;
    get diagnostics new = row_count;
    if new < cardinality(inbox_admit_many.message_ids) then
        perform pg_logical_emit_message(true, 'postroom', ''::text);
    end if;
end
$$;
