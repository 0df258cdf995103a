-- What is ready or claimed, by key: usually one message of each. Without it, a take looked for it among all messages of the key that wait, so that
-- each message of a long queue cost as much as the queue was long.
create index inbox_messages_turned on postroom.inbox_messages (consumer, ordering_key) where state in ('ready', 'claimed');

-- As before, but it does not read what waits behind the first message of a key, and the lease begins when the messages are claimed. Each statement
-- finds its rows by an index, and those are changed by their ids in an array: in one statement, the planner may look for them again for each row of the
-- consumer, if its statistics are those of a moment when the table was different.
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
    chosen uuid[];
    keys   text[];
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
        select array_agg(w.message_id) into chosen from (
            select w.message_id from postroom.inbox_messages w
             where w.consumer = inbox_take.consumer and w.state in ('ready', 'claimed', 'early') and w.due_at > moment
               and coalesce(w.waits_since, looked) > moment + interval '2 seconds'
               for update skip locked) w;
        update postroom.inbox_messages m
           set due_at = moment + (m.due_at - coalesce(m.waits_since, looked)), waits_since = moment
         where m.consumer = inbox_take.consumer and m.message_id = any (chosen);
        insert into postroom.inbox_clocks as c (consumer, at) values (inbox_take.consumer, moment)
            on conflict on constraint inbox_clocks_pkey do update set at = excluded.at;
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
        select unnest(keys) as ordering_key
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
