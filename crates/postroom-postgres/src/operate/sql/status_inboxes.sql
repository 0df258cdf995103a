-- What waits in the inbox of each consumer. Bounded: $1 waiting and $1 dead messages are looked at over all consumers, and at least 1,000
-- of each. Consumers are found by jumping from one to the next along the primary keys, 1,000 at most.
with recursive admitted (consumer) as (
    (select i.consumer from postroom.inbox i order by i.consumer limit 1)
    union all
    select (select i.consumer from postroom.inbox i where i.consumer > a.consumer order by i.consumer limit 1)
      from admitted a where a.consumer is not null
),
kept (consumer) as (
    (select m.consumer from postroom.inbox_messages m order by m.consumer limit 1)
    union all
    select (select m.consumer from postroom.inbox_messages m where m.consumer > k.consumer order by m.consumer limit 1)
      from kept k where k.consumer is not null
),
buried (consumer) as (
    (select d.consumer from postroom.dead_consume d order by d.consumer limit 1)
    union all
    select (select d.consumer from postroom.dead_consume d where d.consumer > b.consumer order by d.consumer limit 1)
      from buried b where b.consumer is not null
),
consumers as materialized (
    select c.consumer
      from (select consumer from admitted union select consumer from kept union select consumer from buried
            union select f.consumer from postroom.inbox_fillers f) c
     where c.consumer is not null order by c.consumer limit 1000
),
share as (select greatest(1000, $1::bigint / greatest((select count(*) from consumers), 1)) as rows)
select c.consumer, w.waiting, w.retrying, w.looked >= s.rows, w.oldest, d.dead, d.dead >= s.rows,
       f.owner, f.expires_at > clock_timestamp(),
       extract(epoch from clock_timestamp() - (f.expires_at - f.lease_ms * interval '1 millisecond'))::float8,
       f.source, extract(epoch from clock_timestamp() - f.source_down_since)::float8, f.source_error,
       e.last_error
  from consumers c
 cross join share s
 cross join lateral (
     select count(*) as looked, count(*) filter (where m.state <> 'done') as waiting,
            count(*) filter (where m.state = 'ready' and m.attempts > 0) as retrying,
            extract(epoch from clock_timestamp() - min(m.received_at) filter (where m.state <> 'done'))::float8 as oldest
       from (select m.state, m.attempts, m.received_at from postroom.inbox_messages m
              where m.consumer = c.consumer limit s.rows) m) w
 cross join lateral (
     select count(*) as dead from (select from postroom.dead_consume d where d.consumer = c.consumer limit s.rows) d) d
  left join lateral (
     select l.last_error
       from (select m.state, m.attempts, m.last_error, m.due_at from postroom.inbox_messages m
              where m.consumer = c.consumer and m.state in ('ready', 'claimed', 'early') order by m.due_at desc limit 1000) l
      where l.attempts > 0 and l.last_error is not null order by l.due_at desc limit 1) e on true
  left join postroom.inbox_fillers f on f.consumer = c.consumer
 order by c.consumer
