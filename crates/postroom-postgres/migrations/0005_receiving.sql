-- The receiving side: messages that wait to be handled, those that cannot be, and the versions that were handled.

-- The inbox is pruned by age. Its rows are appended in the order of time, so a few blocks of summary find the oldest.
create index inbox_age on postroom.inbox using brin (processed_at) with (autosummarize = on);

-- The longest time after which a broker, a replay or an operator may deliver a message again. The inbox is not pruned below it.
alter table postroom.settings add column redelivery_horizon interval not null default '14 days'
    check (redelivery_horizon > '0');

create sequence postroom.inbox_claims;

-- Messages that a consumer took charge of and that wait in the store. Their ids are in postroom.inbox.
--
--   new       just kept; the next take decides whether it is the first of its key
--   ready     the first of its key: to be handed out from due_at on
--   behind    another message of its key is before it
--   claimed   handed out; whose word does not come until due_at loses it
--   aside     to wait for an earlier version; the next take lets its key go on
--   early     waits for an earlier version, until due_at
--   done      handled or dead; the next take lets its key go on and deletes the row
--
-- Only takes move messages on within a key, and they take turns, so no message is forgotten between two transactions that
-- do not see each other.
create table postroom.inbox_messages (
    consumer          text        not null check (octet_length(consumer) between 1 and 255),
    message_id        uuid        not null,
    seq               bigint      not null generated always as identity,
    state             text        not null default 'new'
        check (state in ('new', 'ready', 'behind', 'claimed', 'aside', 'early', 'done')),
    due_at            timestamptz not null default clock_timestamp(),
    ordering_key      text,
    claim             bigint      not null default 0,
    claims            integer     not null default 0,
    claimed_by        text,
    window_over       boolean     not null default false,
    attempts          integer     not null default 0,
    last_error        text,
    history           jsonb       not null default '[]',
    received_at       timestamptz not null default clock_timestamp(),
    topic             text        not null,
    type              text        not null,
    payload           bytea       not null,
    key               text,
    routing_key       text,
    content_type      text        not null,
    headers           json,
    tenant_id         text,
    aggregate_type    text,
    aggregate_id      text,
    aggregate_version bigint,
    occurred_at       timestamptz,
    primary key (consumer, message_id)
) with (fillfactor = 70);
create index inbox_messages_due on postroom.inbox_messages (consumer, due_at, seq) where state in ('ready', 'claimed', 'early');
create index inbox_messages_turn on postroom.inbox_messages (consumer, state, seq) where state in ('new', 'aside', 'done');
create index inbox_messages_key on postroom.inbox_messages (consumer, ordering_key, seq)
    where state in ('new', 'ready', 'behind', 'claimed');
create index inbox_messages_claimed on postroom.inbox_messages (consumer, claimed_by) where state = 'claimed';
create index inbox_messages_version on postroom.inbox_messages (consumer, aggregate_type, aggregate_id, aggregate_version)
    where aggregate_version is not null;

-- Messages that a consumer cannot handle. Full copies, never purged by themselves.
create table postroom.dead_consume (
    consumer          text        not null,
    message_id        uuid        not null,
    seq               bigint      not null,
    attempts          integer     not null,
    cause             text        not null check (cause in ('exhausted', 'permanent', 'poison')),
    error             text        not null,
    history           jsonb       not null default '[]',
    died_at           timestamptz not null default clock_timestamp(),
    ordering_key      text,
    topic             text        not null,
    type              text        not null,
    payload           bytea       not null,
    key               text,
    routing_key       text,
    content_type      text        not null,
    headers           json,
    tenant_id         text,
    aggregate_type    text,
    aggregate_id      text,
    aggregate_version bigint,
    occurred_at       timestamptz,
    primary key (consumer, message_id)
);
create index dead_consume_id on postroom.dead_consume (message_id);

-- The version of each aggregate that a consumer handled last.
create table postroom.inbox_versions (
    consumer       text   not null,
    aggregate_type text   not null,
    aggregate_id   text   not null,
    version        bigint,
    primary key (consumer, aggregate_type, aggregate_id)
) with (fillfactor = 70);

-- For every language: whether a message may have its effect in this transaction. False: it had it before.
create function postroom.inbox_admit(consumer text, message_id uuid) returns boolean
language plpgsql volatile
as $$
begin
    insert into postroom.inbox (consumer, message_id) values (inbox_admit.consumer, inbox_admit.message_id)
        on conflict do nothing;
    return found;
end
$$;

-- The same for many at once; returns those that may have their effect.
create function postroom.inbox_admit_many(consumer text, message_ids uuid[]) returns setof uuid
language sql volatile
as $$
    insert into postroom.inbox (consumer, message_id)
    select inbox_admit_many.consumer, id from unnest(message_ids) id order by id -- one order for all, so that none deadlock
        on conflict do nothing
    returning inbox.message_id
$$;

-- For every language: whether a version is newer than the one that was noted last; notes it if so. Concurrent calls for one
-- aggregate wait for each other.
create function postroom.inbox_newer(consumer text, aggregate_type text, aggregate_id text, version bigint) returns boolean
language plpgsql volatile
as $$
begin
    insert into postroom.inbox_versions as v values (inbox_newer.consumer, inbox_newer.aggregate_type,
                                                     inbox_newer.aggregate_id, inbox_newer.version)
        on conflict on constraint inbox_versions_pkey do update set version = excluded.version
        where v.version is null or v.version < excluded.version;
    return found;
end
$$;

-- Hands out what is due: the first of each key, oldest first. Call it in a transaction of its own: takes of one consumer
-- take turns. Settle each with inbox_done, in the transaction of its effect, or with inbox_fail. What is not settled when
-- the lease ends is handed out again, and is dead when that happened claims_max times.
create function postroom.inbox_take(
    consumer   text,
    max        integer  default 1,
    owner      text     default 'anybody',
    lease      interval default '30 seconds',
    claims_max integer  default 10
) returns setof postroom.inbox_messages
language plpgsql volatile
as $$
#variable_conflict use_column
declare
    moment timestamptz;
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

    -- What is new is ready, unless another of its key is before it or in work.
    update postroom.inbox_messages m
       set state = case when m.ordering_key is not null and exists (
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
               claimed_by = inbox_take.owner, due_at = moment + inbox_take.lease,
               window_over = m.window_over or m.state = 'early'
          from due
         where m.consumer = inbox_take.consumer and m.message_id = due.message_id
        returning m.*
    )
    select * from taken order by seq;
end
$$;

-- Settles a message in the transaction of its effect. Fails when the lease ended and somebody else has the message: the
-- transaction is to be rolled back, and the effect with it.
create function postroom.inbox_done(consumer text, message_id uuid, claim bigint) returns void
language plpgsql volatile
as $$
begin
    update postroom.inbox_messages m set state = 'done', payload = ''
     where m.consumer = inbox_done.consumer and m.message_id = inbox_done.message_id
       and m.claim = inbox_done.claim and m.state = 'claimed';
    if not found then
        raise exception 'postroom.inbox_done: claim % of message % has lapsed', inbox_done.claim, inbox_done.message_id
            using errcode = 'object_not_in_prerequisite_state',
                  hint = 'roll back; somebody else has the message. Take with a longer lease, or renew it';
    end if;
end
$$;

-- Renews the claims of an owner.
create function postroom.inbox_renew(consumer text, owner text, lease interval default '30 seconds') returns bigint
language sql volatile
as $$
    with renewed as (
        update postroom.inbox_messages m set due_at = clock_timestamp() + inbox_renew.lease
         where m.consumer = inbox_renew.consumer and m.claimed_by = inbox_renew.owner and m.state = 'claimed'
        returning 1
    )
    select count(*) from renewed
$$;

-- Says that a message could not be handled: it is tried again after a wait, or is dead. Returns whether it is dead. Without
-- retry_after the wait is min(300, 3^attempts) seconds plus up to 2.5.
create function postroom.inbox_fail(
    consumer     text,
    message_id   uuid,
    claim        bigint,
    error        text,
    retry_after  interval default null,
    attempts_max integer  default 8,
    give_up      boolean  default false
) returns boolean
language plpgsql volatile
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
               due_at = clock_timestamp() + coalesce(inbox_fail.retry_after,
                   (least(300, power(3, least(burned, 20))) + random() * 2.5) * interval '1 second')
         where m.consumer = inbox_fail.consumer and m.message_id = inbox_fail.message_id;
    end if;
    return dead;
end
$$;

-- Makes a claimed message a dead one. For inbox_fail and for the consumer runtime, which have checked the claim.
create function postroom.inbox_bury(consumer text, message_id uuid, attempts integer, cause text, error text) returns void
language plpgsql volatile
as $$
begin
    insert into postroom.dead_consume
    select m.consumer, m.message_id, m.seq, inbox_bury.attempts, inbox_bury.cause, inbox_bury.error,
           postroom.failure_noted(m.history, inbox_bury.attempts, inbox_bury.error), clock_timestamp(), m.ordering_key,
           m.topic, m.type, m.payload, m.key, m.routing_key, m.content_type, m.headers, m.tenant_id, m.aggregate_type,
           m.aggregate_id, m.aggregate_version, m.occurred_at
      from postroom.inbox_messages m
     where m.consumer = inbox_bury.consumer and m.message_id = inbox_bury.message_id
        on conflict on constraint dead_consume_pkey do nothing;
    update postroom.inbox_messages m set state = 'done', payload = ''
     where m.consumer = inbox_bury.consumer and m.message_id = inbox_bury.message_id;
end
$$;

-- Forgets messages that were processed so long ago, at most `max` of them; returns how many. Call it until it returns less
-- than `max`, each time in a transaction of its own.
create function postroom.inbox_prune(older_than interval, max integer default 10000) returns bigint
language plpgsql volatile
as $$
declare
    horizon interval := (select s.redelivery_horizon from postroom.settings s);
    pruned  bigint;
begin
    if inbox_prune.older_than < horizon then
        raise exception 'postroom.inbox_prune: % is shorter than the redelivery horizon of %; nothing was pruned',
            inbox_prune.older_than, horizon
            using errcode = 'invalid_parameter_value',
                  hint = 'a message that comes again after its row is gone has its effect twice; change redelivery_horizon in postroom.settings only when nothing can be delivered again so late';
    end if;
    with old as (
        select i.ctid from postroom.inbox i
         where i.processed_at < clock_timestamp() - inbox_prune.older_than
           -- One that waits would have its effect a second time.
           and not exists (select from postroom.inbox_messages m where m.consumer = i.consumer and m.message_id = i.message_id)
         limit inbox_prune.max
    ), gone as (
        delete from postroom.inbox i using old where i.ctid = old.ctid returning 1
    )
    select count(*) into pruned from gone;
    return pruned;
end
$$;

alter table postroom.audit drop constraint audit_action_check;
alter table postroom.audit add constraint audit_action_check check (action in
    ('dead.retry', 'dead.discard', 'key.park', 'key.unpark', 'key.skip', 'inbox.retry', 'inbox.discard', 'inbox.prune'));
