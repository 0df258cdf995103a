-- One message at every consumer whose inbox is here. $1 id. Consumers are found by jumping along the primary keys.
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
consumers as (
    select consumer from admitted union select consumer from kept
    union select d.consumer from postroom.dead_consume d where d.message_id = $1
)
select c.consumer, m.state, coalesce(m.ordering_key, d.ordering_key) as key, m.attempts::bigint as attempts, m.last_error,
       m.history::text as history, extract(epoch from m.due_at - clock_timestamp())::float8 as due_in, m.claimed_by,
       (select h.message_id::text from postroom.inbox_messages h
         where h.consumer = m.consumer and h.ordering_key = m.ordering_key and h.seq < m.seq
           and m.state in ('new', 'behind') and h.state in ('new', 'ready', 'behind', 'claimed') order by h.seq limit 1) as behind,
       d.attempts::bigint as dead_attempts, d.cause, d.error, extract(epoch from clock_timestamp() - d.died_at)::float8 as died_ago,
       d.history::text as dead_history, extract(epoch from clock_timestamp() - i.processed_at)::float8 as received_ago,
       (select a.actor || ' ' || to_char(a.at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') || ': ' || a.reason
          from postroom.audit a where a.action = 'inbox.discard' and a.message_ids @> array[$1::uuid]
         order by a.id desc limit 1) as discarded
  from consumers c
  left join postroom.inbox i on i.consumer = c.consumer and i.message_id = $1
  left join postroom.inbox_messages m on m.consumer = c.consumer and m.message_id = $1 and m.state <> 'done'
  left join postroom.dead_consume d on d.consumer = c.consumer and d.message_id = $1
 where c.consumer is not null and (i.message_id is not null or m.message_id is not null or d.message_id is not null)
 order by c.consumer
