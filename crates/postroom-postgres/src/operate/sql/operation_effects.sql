-- What became, at each consumer of this database, of the messages that operation $1 gave out. Consumers are found by jumping from one to
-- the next along the primary key, 100 at most.
with recursive given as materialized (
    -- A dead letter of a consumer was in the inbox before: without an effect.
    select distinct g.id, o.created_at, o.side = 'in' as handled_now
      from postroom.operations o
      join postroom.audit a on a.at >= o.created_at and a.filter ->> 'operation' = o.id::text and a.action in ('replay', 'dead.retry', 'inbox.retry')
     cross join lateral unnest(a.message_ids) g (id)
     where o.id = $1
),
consumers (consumer, number) as (
    (select i.consumer, 1 from postroom.inbox i order by i.consumer limit 1)
    union all
    select (select i.consumer from postroom.inbox i where i.consumer > c.consumer order by i.consumer limit 1), c.number + 1
      from consumers c where c.consumer is not null and c.number < 100
)
select c.consumer, e.effects, e.suppressed, (select count(*) from given) - e.effects - e.suppressed
  from consumers c
 cross join lateral (
     select count(*) filter (where g.handled_now or i.processed_at >= g.created_at) as effects,
            count(*) filter (where not g.handled_now and i.processed_at < g.created_at) as suppressed
       from given g
       join postroom.inbox i on i.consumer = c.consumer and i.message_id = g.id
      -- The inbox knows messages that wait or are dead as well.
      where not exists (select from postroom.dead_consume d where d.consumer = c.consumer and d.message_id = g.id)
        and not exists (select from postroom.inbox_messages m
                         where m.consumer = c.consumer and m.message_id = g.id and m.state <> 'done')) e
 where c.consumer is not null
 order by c.consumer
