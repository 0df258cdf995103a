-- Messages of a route's topics behind $2, up to $3, in the order of their seqs, at most $13. $1 route, $4 rows that are looked at, about
-- twice as many: lanes are not equally full; $5 ids, $6 since and $7 until in milliseconds, $8 topic, $9 type, $10 key, $11 tenant,
-- $12 aggregate; null: any. Up to the horizon, every lane was looked at. The first row is there even if nothing matches: it has the horizon.
-- Ready is what the route has finished with.
with share as materialized (
    select greatest(8, 2 * $4::bigint / greatest(count(*), 1)) as rows from postroom.lanes l where l.route = $1
),
page as materialized (
    select o.*, l.position_seq, l.position_snapshot
      from postroom.lanes l
     cross join lateral (
         select o.lane, o.seq, o.xid, o.id, o.topic, o.type, coalesce(o.key, o.aggregate_id) as key, o.aggregate_id, o.tenant_id,
                o.occurred_at
           from postroom.outbox o
          where o.lane = l.lane and o.seq > $2 and o.seq <= $3 order by o.seq limit (select s.rows from share s)) o
     where l.route = $1
),
horizon as (
    select coalesce(min(p.last) filter (where p.rows >= (select s.rows from share s)), $3) as seq
      from (select max(p.seq) as last, count(*) as rows from page p group by p.lane) p
)
select h.seq, m.seq, m.id, m.type, m.topic, m.key, (extract(epoch from m.occurred_at) * 1000)::bigint, 'permanent', '', 0::float8,
       m.seq <= m.position_seq and pg_visible_in_snapshot(m.xid, m.position_snapshot)
           and not exists (select from postroom.parked p where p.route = $1 and p.seq = m.seq)
           and not exists (select from postroom.dead_letters d where d.route = $1 and d.seq = m.seq)
  from horizon h
  left join (
      select p.* from page p
       where exists (select from postroom.routes r cross join unnest(r.topics) t
                      where r.name = $1 and (p.topic = t or (t like '%*' and starts_with(p.topic, left(t, -1)))))
         and ($5::uuid[] is null or p.id = any ($5))
         and ($6::bigint is null or p.occurred_at >= to_timestamp($6 / 1000.0))
         and ($7::bigint is null or p.occurred_at < to_timestamp($7 / 1000.0))
         and ($8::text is null or p.topic = $8)
         and ($9::text is null or p.type = $9)
         and ($10::text is null or p.key = $10)
         and ($11::text is null or p.tenant_id = $11)
         and ($12::text is null or p.aggregate_id = $12)) m on m.seq <= h.seq
 order by m.seq limit $13::bigint
