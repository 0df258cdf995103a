-- What became, at each consumer of this database, of the messages that operation $1 gave out. Consumers are found by jumping from one to
-- the next along the primary keys, 100 at most of each.
with recursive given as materialized (
    -- A dead letter of a consumer was in the inbox before: without an effect.
    select distinct g.id, o.created_at, o.side = 'in' as handled_now
      from postroom.operations o
      join postroom.audit a on a.at >= o.created_at and a.filter ->> 'operation' = o.id::text and a.action in ('replay', 'dead.retry', 'inbox.retry')
     cross join lateral unnest(a.message_ids) g (id)
     where o.id = $1
),
admitted (consumer, number) as (
    (select i.consumer, 1 from postroom.inbox i order by i.consumer limit 1)
    union all
    select (select i.consumer from postroom.inbox i where i.consumer > c.consumer order by i.consumer limit 1), c.number + 1
      from admitted c where c.consumer is not null and c.number < 100
),
kept (consumer, number) as (
    (select m.consumer, 1 from postroom.inbox_messages m order by m.consumer limit 1)
    union all
    select (select m.consumer from postroom.inbox_messages m where m.consumer > c.consumer order by m.consumer limit 1), c.number + 1
      from kept c where c.consumer is not null and c.number < 100
),
found as (
    select c.consumer,
           case when exists (select from postroom.inbox_messages m where m.consumer = c.consumer and m.message_id = g.id and m.state <> 'done')
                    then 'waiting'
                when exists (select from postroom.dead_consume d where d.consumer = c.consumer and d.message_id = g.id) then 'dead'
                when i.message_id is null then 'missing'
                when g.handled_now or i.processed_at >= g.created_at then 'effect'
                else 'suppressed' end as state
      from (select consumer from admitted union select consumer from kept) c
     cross join given g
      left join postroom.inbox i on i.consumer = c.consumer and i.message_id = g.id
     where c.consumer is not null
)
select f.consumer, count(*) filter (where f.state = 'effect'), count(*) filter (where f.state = 'suppressed'),
       count(*) filter (where f.state = 'waiting'), count(*) filter (where f.state = 'dead'), count(*) filter (where f.state = 'missing')
  from found f group by f.consumer order by f.consumer
