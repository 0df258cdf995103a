-- Messages by filter, newest first, one row for each route that takes them, or one without a route if none does. $1 route, $2 topic, $3 key, $4 place, $5 newer than and
-- $6 older than so many seconds; null: any. $7 limit. $8 rows of each lane of the outbox are looked at, the newest, but not more than $9
-- over all lanes; where a key is given, in its lane alone. The first row has no message and says whether that left rows out, and
-- the age to which the list has everything all the same. $10 microseconds since 1970, $11 id, $12 route and $13 seq of the last entry of the page before; null: none.
with lanes as (
    select n::smallint as lane, least($8::bigint, $9::bigint / count(*) over ()) as share
      from postroom.settings s cross join generate_series(0, s.lanes - 1) n
     where $3::text is null or n = abs(hashtextextended($3, 0) % s.lanes)
),
looked as materialized (
    select o.*, l.share
      from lanes l
     cross join lateral (
         select f.xid, f.seq, f.lane, f.occurred_at, f.id, f.topic, f.type, coalesce(f.key, f.aggregate_id) as key
           from postroom.outbox f where f.lane = l.lane order by f.seq desc limit l.share) o
),
of_outbox as (
    select r.name, o.id, o.seq, case when b.passed then 'done' else 'waiting' end as state, o.topic, o.type, o.key, 0::bigint as attempts,
           o.occurred_at
      from looked o
     cross join postroom.routes r
      join postroom.lanes l on l.route = r.name and l.lane = o.lane
     cross join lateral (
         select (o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot))
                or coalesce(o.seq <= l.catch_up_seq and pg_visible_in_snapshot(o.xid, l.catch_up_snapshot), false) as passed) b
     where ($1::text is null or r.name = $1)
       and exists (select from unnest(r.topics) t where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))
       and not exists (select from postroom.parked p where p.route = r.name and p.seq = o.seq and p.id = o.id)
       and not exists (select from postroom.dead_letters d where d.route = r.name and d.seq = o.seq and d.id = o.id)
),
unrouted as (
    select null::text as name, o.id, o.seq, 'unrouted' as state, o.topic, o.type, o.key, 0::bigint as attempts, o.occurred_at
      from looked o
     where $1::text is null
       and not exists (select from postroom.routes r cross join unnest(r.topics) t
                        where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))
),
matching as (
    select m.*
      from (select * from of_outbox where coalesce($4::text, 'waiting') in ('waiting', 'done')
             union all
            select * from unrouted where coalesce($4::text, 'unrouted') = 'unrouted'
             union all
            select p.route, p.id, p.seq, p.state, p.topic, p.type, coalesce(p.key, p.aggregate_id), p.attempts::bigint, p.occurred_at
              from postroom.parked p
             where ($1::text is null or p.route = $1) and ($4::text is null or p.state = $4)
             union all
            select d.route, d.id, d.seq, 'dead', d.topic, d.type, coalesce(d.key, d.aggregate_id), d.attempts::bigint, d.occurred_at
              from postroom.dead_letters d
             where ($1::text is null or d.route = $1) and coalesce($4::text, 'dead') = 'dead') m
     where ($2::text is null or m.topic = $2)
       and ($3::text is null or m.key = $3)
       and ($4::text is null or m.state = $4)
       and ($5::float8 is null or m.occurred_at >= clock_timestamp() - $5 * interval '1 second')
       and ($6::float8 is null or m.occurred_at <= clock_timestamp() - $6 * interval '1 second')
       and ($10::bigint is null
            or (m.occurred_at, m.id) < ('epoch'::timestamptz + $10 * interval '1 microsecond', $11::text::uuid)
            or (m.occurred_at = 'epoch'::timestamptz + $10 * interval '1 microsecond' and m.id = $11::text::uuid
                and (coalesce(m.name, ''), m.seq) > ($12::text, $13::bigint)))
)
select null::text, null::uuid, null::text, null::text, null::text, null::text, null::bigint, null::float8,
       null::bigint, null::bigint, coalesce($4::text, 'waiting') in ('waiting', 'done', 'unrouted')
       and exists (select from looked group by lane having count(*) >= min(share)),
       -- Where a lane was cut: the newest of the first rows there, since one of them may say that it is older than it is.
       (select extract(epoch from statement_timestamp() - max(k.occurred_at))::float8
          from looked k join (select lane, min(seq) as seq from looked group by lane having count(*) >= min(share)) c
            on c.lane = k.lane and k.seq < c.seq + 500)
union all
(select m.name, m.id, m.state, m.topic, m.type, m.key, m.attempts, extract(epoch from statement_timestamp() - m.occurred_at)::float8,
        case when isfinite(m.occurred_at) then (extract(epoch from m.occurred_at) * 1000000)::bigint end, m.seq, false, null::float8
   from matching m order by m.occurred_at desc, m.id desc, coalesce(m.name, ''), m.seq limit $7)
