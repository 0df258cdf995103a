-- A page of messages by filter, in the order of their seqs, the highest first: one row for each route that takes them, or one without a route if none
-- does. $1 route, $2 topic, $3 key, $4 place, $5 newer than and $6 older than so many seconds; null: any. $7 limit. Of the outbox, about $8 of
-- the newest seqs are looked at, whatever lanes they are in, and where a key is given as many rows of its lane; as many rows of the parked and of the dead messages of
-- each route, but not more than about $9 over all. The first row has no message, and the lowest seq to which everything was read; null: to the
-- end. $10 seq, $11 id and $12 route of the last entry of the page before; null: none.
with asked as (
    select r.name, r.topics, $9::bigint / greatest(count(*) over (), 1) as share
      from postroom.routes r where $1::text is null or r.name = $1
),
lanes as materialized (
    select n::smallint as lane
      from postroom.settings s cross join generate_series(0, s.lanes - 1) n
     where ($3::text is null or n = abs(hashtextextended($3, 0) % s.lanes))
       and coalesce($4::text, 'waiting') in ('waiting', 'done', 'unrouted')
),
-- The newest row not behind the place, and so many seqs from there on: a lane with most of the rows is read no less far than the others.
span as materialized (
    select max(t.seq) as upto,
           max(t.seq) - least($8::bigint, greatest($9 / greatest((select count(*) from asked), 1), 1000)) as above
      from lanes l
     cross join lateral (
         select f.seq from postroom.outbox f where f.lane = l.lane and f.seq <= coalesce($10::bigint, 9223372036854775807)
          order by f.seq desc limit 1) t
),
looked as materialized (
    select o.xid, o.seq, o.lane, o.occurred_at, o.id, o.topic, o.type, coalesce(o.key, o.aggregate_id) as key
      from span w cross join lanes l
     cross join lateral (
         select f.* from postroom.outbox f where $3 is null and f.lane = l.lane and f.seq > w.above and f.seq <= w.upto
          union all
         -- By itself and without a lower bound, so that the planner sees that the index already has this order.
         (select f.* from postroom.outbox f where $3 is not null and f.lane = l.lane and f.seq <= w.upto order by f.seq desc limit $8)) o
),
parked as materialized (
    select p.route as name, p.id, p.seq, p.state, p.topic, p.type, coalesce(p.key, p.aggregate_id) as key, p.attempts::bigint, p.occurred_at,
           least($8, a.share) as share
      from asked a
     cross join lateral (
         select * from postroom.parked q where q.route = a.name and q.seq <= coalesce($10, 9223372036854775807)
          order by q.seq desc limit least($8, a.share)) p
     where coalesce($4, 'retry') in ('scheduled', 'retry', 'queued')
),
dead as materialized (
    select d.route as name, d.id, d.seq, 'dead' as state, d.topic, d.type, coalesce(d.key, d.aggregate_id) as key, d.attempts::bigint,
           d.occurred_at, least($8, a.share) as share
      from asked a
     cross join lateral (
         select * from postroom.dead_letters q where q.route = a.name and q.seq <= coalesce($10, 9223372036854775807)
          order by q.seq desc limit least($8, a.share)) d
     where coalesce($4, 'dead') = 'dead'
),
-- Of what was read in part, below the highest of these seqs something may be left out.
read as materialized (
    select max(c.seq) as to_seq
      from (select w.above + 1 as seq from span w
             where $3 is null
               and exists (select from lanes l cross join lateral (
                               select from postroom.outbox f where f.lane = l.lane and f.seq <= w.above limit 1) b)
             union all
            select min(seq) from looked having $3 is not null and count(*) >= $8
             union all
            select min(seq) from parked group by name having count(*) >= min(share)
             union all
            select min(seq) from dead group by name having count(*) >= min(share)) c
),
of_outbox as (
    select r.name, o.id, o.seq, case when b.passed then 'done' else 'waiting' end as state, o.topic, o.type, o.key, 0::bigint as attempts,
           o.occurred_at
      from looked o
     cross join asked r
      join postroom.lanes l on l.route = r.name and l.lane = o.lane
     cross join lateral (
         select (o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot))
                or coalesce(o.seq <= l.catch_up_seq and pg_visible_in_snapshot(o.xid, l.catch_up_snapshot), false) as passed) b
     where exists (select from unnest(r.topics) t where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))
       and not exists (select from postroom.parked p where p.route = r.name and p.seq = o.seq and p.id = o.id)
       and not exists (select from postroom.dead_letters d where d.route = r.name and d.seq = o.seq and d.id = o.id)
),
unrouted as (
    select null::text as name, o.id, o.seq, 'unrouted' as state, o.topic, o.type, o.key, 0::bigint as attempts, o.occurred_at
      from looked o
     where $1 is null
       and not exists (select from postroom.routes r cross join unnest(r.topics) t
                        where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))
),
matching as (
    select m.*
      from (select * from of_outbox union all select * from unrouted
             union all
            select name, id, seq, state, topic, type, key, attempts, occurred_at from parked
             union all
            select name, id, seq, state, topic, type, key, attempts, occurred_at from dead) m
     where ($2::text is null or m.topic = $2)
       and ($3 is null or m.key = $3)
       and ($4 is null or m.state = $4)
       and ($5::float8 is null or m.occurred_at >= clock_timestamp() - $5 * interval '1 second')
       and ($6::float8 is null or m.occurred_at <= clock_timestamp() - $6 * interval '1 second')
       and m.seq >= coalesce((select to_seq from read), m.seq)
       and ($10 is null or m.seq < $10
            or (m.seq = $10 and (m.id < $11::text::uuid or (m.id = $11::text::uuid and coalesce(m.name, '') > $12::text))))
)
select null::text, null::uuid, null::text, null::text, null::text, null::text, null::bigint, null::float8, to_seq from read
union all
(select m.name, m.id, m.state, m.topic, m.type, m.key, m.attempts, extract(epoch from statement_timestamp() - m.occurred_at)::float8, m.seq
   from matching m order by m.seq desc, m.id desc, coalesce(m.name, '') limit $7)
