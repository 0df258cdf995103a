-- Where the look at waits has come to in the keys of a consumer.
alter table postroom.inbox_clocks add column swept_to text;

-- As before, but a transaction that sees an old state is refused: it put a message behind one that was gone already, and nothing looked at it again
-- before another message of its key came. The look that is made every five seconds examines 200 keys more, whatever is known of them. What was
-- claimed too often is never handed out, also if there is more of it than one call buries. A missing argument is an error.
create or replace function postroom.inbox_take(
    consumer   text,
    max        integer  default 1,
    owner      text     default 'anybody',
    lease      interval default '30 seconds',
    claims_max integer  default 10
) returns setof postroom.inbox_messages
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    moment timestamptz;
    looked timestamptz;
    sweep  text;
    chosen uuid[];
    keys   text[];
    -- Keys that are looked at now, whether or not anything is known of them.
    swept  text[];
begin
    if (inbox_take.max between 1 and 10000) is not true then
        raise exception 'postroom.inbox_take: max is %; it must be 1 to 10000', inbox_take.max using errcode = 'invalid_parameter_value';
    end if;
    if (inbox_take.lease >= interval '1 second') is not true then
        raise exception 'postroom.inbox_take: the lease is %; it must be a second or more', inbox_take.lease
            using errcode = 'invalid_parameter_value';
    end if;
    if (inbox_take.claims_max >= 1) is not true then
        raise exception 'postroom.inbox_take: claims_max is %; it must be 1 or more', inbox_take.claims_max
            using errcode = 'invalid_parameter_value';
    end if;
    if current_setting('transaction_isolation') = 'repeatable read' then
        raise exception 'postroom.inbox_take: the transaction is at REPEATABLE READ, so it does not see what other workers have settled'
            using errcode = 'invalid_transaction_state', hint = 'begin it with: begin isolation level read committed';
    end if;
    perform pg_advisory_xact_lock(hashtextextended('postroom.inbox_take ' || inbox_take.consumer, 0));
    moment := clock_timestamp();

    -- The clock was ahead when some waits were noted, and is not any more: they wait from now on, no longer than they were to
    -- wait then. Looked at every five seconds, and at once when the clock is behind the last look.
    select c.at, c.swept_to into looked, sweep from postroom.inbox_clocks c where c.consumer = inbox_take.consumer;
    if looked is null or looked not between moment - interval '5 seconds' and moment then
        -- What has no such time was written by an older program: the last look is as good. Whoever holds a row has just changed it.
        select array_agg(w.message_id) into chosen from (
            select w.message_id from postroom.inbox_messages w
             where w.consumer = inbox_take.consumer and w.state in ('ready', 'claimed', 'early') and w.due_at > moment
               and coalesce(w.waits_since, looked) > moment + interval '2 seconds'
               for update skip locked) w;
        update postroom.inbox_messages m
           set due_at = moment + (m.due_at - coalesce(m.waits_since, looked)), waits_since = moment
         where m.consumer = inbox_take.consumer and m.message_id = any (chosen);
        -- The next keys, whatever happened to them: somebody may have deleted the first message of one by hand.
        with recursive next as (
            (select m.ordering_key, 1 as number from postroom.inbox_messages m
              where m.consumer = inbox_take.consumer and m.ordering_key > coalesce(sweep, '')
                and m.state in ('new', 'ready', 'behind', 'claimed') order by m.ordering_key limit 1)
             union all
            select (select m.ordering_key from postroom.inbox_messages m
                     where m.consumer = inbox_take.consumer and m.ordering_key > n.ordering_key
                       and m.state in ('new', 'ready', 'behind', 'claimed') order by m.ordering_key limit 1), n.number + 1
              from next n where n.ordering_key is not null and n.number < 200)
        select array_agg(n.ordering_key) filter (where n.ordering_key is not null) into swept from next n;
        sweep := case when cardinality(swept) >= 200 then (select max(k) from unnest(swept) k) end;
        insert into postroom.inbox_clocks as c (consumer, at, swept_to) values (inbox_take.consumer, moment, sweep)
            on conflict on constraint inbox_clocks_pkey do update set at = excluded.at, swept_to = excluded.swept_to;
    end if;

    -- Claims that killed everybody who had them.
    select array_agg(l.message_id) into chosen from (
        select m.message_id from postroom.inbox_messages m
         where m.consumer = inbox_take.consumer and m.state in ('ready', 'claimed', 'early') and m.state = 'claimed'
           and m.due_at <= moment and m.claims >= inbox_take.claims_max
         order by m.due_at, m.seq limit 100 for update skip locked) l;
    if chosen is not null then
        insert into postroom.dead_consume
        select m.consumer, m.message_id, m.seq, m.attempts, 'poison',
               format('%s claims in a row ended without a word: whoever had it died or hung', m.claims), m.history, moment,
               m.ordering_key, m.topic, m.type, m.payload, m.key, m.routing_key, m.content_type, m.headers, m.tenant_id,
               m.aggregate_type, m.aggregate_id, m.aggregate_version, m.occurred_at
          from postroom.inbox_messages m where m.consumer = inbox_take.consumer and m.message_id = any (chosen)
            on conflict do nothing;
        update postroom.inbox_messages m set state = 'done', payload = ''
         where m.consumer = inbox_take.consumer and m.message_id = any (chosen);
    end if;

    -- What is finished or set aside lets the next of its key be examined. So does what is new: it may have been set aside, and
    -- let go before any take saw it.
    select array_agg(f.message_id), array_agg(distinct f.ordering_key) filter (where f.ordering_key is not null) into chosen, keys from (
        select m.message_id, m.ordering_key from postroom.inbox_messages m
         where m.consumer = inbox_take.consumer and m.state in ('new', 'aside', 'done') and m.state <> 'new'
         order by m.state, m.seq limit 2000 for update skip locked) f;
    delete from postroom.inbox_messages m
     where m.consumer = inbox_take.consumer and m.message_id = any (chosen) and m.state = 'done';
    update postroom.inbox_messages m set state = 'early'
     where m.consumer = inbox_take.consumer and m.message_id = any (chosen) and m.state = 'aside';
    select array_agg(distinct k.ordering_key) into keys from (
        select unnest(keys || swept) as ordering_key
         union all
        (select n.ordering_key from postroom.inbox_messages n
          where n.consumer = inbox_take.consumer and n.state = 'new' and n.state in ('new', 'aside', 'done')
            and n.ordering_key is not null
          order by n.seq limit 2000)) k;
    select array_agg(n.message_id) into chosen
      from unnest(keys) k
     cross join lateral (
           select n.message_id from postroom.inbox_messages n
            where n.consumer = inbox_take.consumer and n.ordering_key = k
              and n.state in ('new', 'ready', 'behind', 'claimed')
            order by n.seq limit 1) n;
    update postroom.inbox_messages m set state = 'new'
     where m.consumer = inbox_take.consumer and m.message_id = any (chosen) and m.state = 'behind';

    -- What is new is ready, unless another of its key is before it or in work. It never waits, whatever the clock said when it came.
    select array_agg(n.message_id) into chosen from (
        select n.message_id from postroom.inbox_messages n
         where n.consumer = inbox_take.consumer and n.state = 'new' and n.state in ('new', 'aside', 'done')
         order by n.seq limit 2000 for update skip locked) n;
    update postroom.inbox_messages m
       set due_at = least(m.due_at, moment), state = case when m.ordering_key is not null and (exists (
                     select from postroom.inbox_messages e
                      where e.consumer = m.consumer and e.ordering_key = m.ordering_key
                        and e.state in ('new', 'ready', 'behind', 'claimed') and e.seq < m.seq)
                   or exists (
                     select from postroom.inbox_messages e
                      where e.consumer = m.consumer and e.ordering_key = m.ordering_key and e.state in ('ready', 'claimed')))
                   then 'behind' else 'ready' end
     where m.consumer = inbox_take.consumer and m.message_id = any (chosen);

    -- The lease begins now, however long all that took.
    moment := clock_timestamp();
    select array_agg(d.message_id) into chosen from (
        select m.message_id from postroom.inbox_messages m
         where m.consumer = inbox_take.consumer and m.state in ('ready', 'claimed', 'early') and m.due_at <= moment
           and (m.state <> 'claimed' or m.claims < inbox_take.claims_max)
           -- Of the early versions of an aggregate whose window is over, the lowest: it tells what is missing.
           and (m.state <> 'early' or not exists (
                select from postroom.inbox_messages e
                 where e.consumer = m.consumer and e.aggregate_type = m.aggregate_type and e.aggregate_id = m.aggregate_id
                   and e.aggregate_version < m.aggregate_version and e.aggregate_version is not null
                   and e.state = 'early' and e.due_at <= moment))
         order by m.due_at, m.seq limit inbox_take.max for update skip locked) d;
    return query
    with taken as (
        update postroom.inbox_messages m
           set state = 'claimed', claim = nextval('postroom.inbox_claims'), claims = m.claims + 1,
               claimed_by = inbox_take.owner, due_at = moment + inbox_take.lease, waits_since = moment,
               window_over = m.window_over or m.state = 'early'
         where m.consumer = inbox_take.consumer and m.message_id = any (chosen)
        returning m.*
    )
    select * from taken order by seq;
end
$$;

-- As before. What is locked is being settled, and needs no time: the call does not wait for it.
create or replace function postroom.inbox_renew(consumer text, owner text, lease interval default '30 seconds') returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    held    uuid[];
    renewed bigint;
begin
    if (inbox_renew.lease >= interval '1 second') is not true then
        raise exception 'postroom.inbox_renew: the lease is %; it must be a second or more', inbox_renew.lease
            using errcode = 'invalid_parameter_value';
    end if;
    select array_agg(l.message_id) into held from (
        select m.message_id from postroom.inbox_messages m
         where m.consumer = inbox_renew.consumer and m.claimed_by = inbox_renew.owner and m.state = 'claimed'
           for update skip locked) l;
    update postroom.inbox_messages m set due_at = clock_timestamp() + inbox_renew.lease, waits_since = clock_timestamp()
     where m.consumer = inbox_renew.consumer and m.message_id = any (held);
    get diagnostics renewed = row_count;
    return renewed;
end
$$;

-- As before. An error without a text is one too, and of a long one the beginning is kept.
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
    told   text := left(coalesce(inbox_fail.error, 'the worker gave no error text'), 16384);
begin
    select m.attempts + 1 into burned from postroom.inbox_messages m
     where m.consumer = inbox_fail.consumer and m.message_id = inbox_fail.message_id
       and m.claim = inbox_fail.claim and m.state = 'claimed'
       for update;
    if not found then
        raise exception 'postroom.inbox_fail: claim % of message % has lapsed', inbox_fail.claim, inbox_fail.message_id
            using errcode = 'object_not_in_prerequisite_state', hint = 'somebody else has the message; nothing is to be done';
    end if;
    dead := coalesce(inbox_fail.give_up, false) or burned >= coalesce(inbox_fail.attempts_max, 8);
    if dead then
        perform postroom.inbox_bury(inbox_fail.consumer, inbox_fail.message_id, burned,
                                    case when inbox_fail.give_up then 'permanent' else 'exhausted' end, told);
    else
        update postroom.inbox_messages m
           set state = 'ready', attempts = burned, claims = 0, claimed_by = null, last_error = told,
               history = postroom.failure_noted(m.history, burned, told),
               waits_since = clock_timestamp(),
               due_at = clock_timestamp() + coalesce(inbox_fail.retry_after,
                   (least(300, power(3, least(burned, 20))) + random() * 2.5) * interval '1 second')
         where m.consumer = inbox_fail.consumer and m.message_id = inbox_fail.message_id;
    end if;
    return dead;
end
$$;

-- As before. What is settled has no payload any more, and is not buried.
create or replace function postroom.inbox_bury(consumer text, message_id uuid, attempts integer, cause text, error text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    insert into postroom.dead_consume
    select m.consumer, m.message_id, m.seq, inbox_bury.attempts, inbox_bury.cause, inbox_bury.error,
           postroom.failure_noted(m.history, inbox_bury.attempts, inbox_bury.error), clock_timestamp(), m.ordering_key,
           m.topic, m.type, m.payload, m.key, m.routing_key, m.content_type, m.headers, m.tenant_id, m.aggregate_type,
           m.aggregate_id, m.aggregate_version, m.occurred_at
      from postroom.inbox_messages m
     where m.consumer = inbox_bury.consumer and m.message_id = inbox_bury.message_id and m.state <> 'done'
        on conflict on constraint dead_consume_pkey do nothing;
    update postroom.inbox_messages m set state = 'done', payload = ''
     where m.consumer = inbox_bury.consumer and m.message_id = inbox_bury.message_id;
end
$$;
