-- Dead letters of a route behind $2, up to $3, in the order of their seqs. $1 route, $4 rows that are looked at; $5 ids, $6 since and $7
-- until they died, in milliseconds, $8 topic, $9 type, $10 key, $11 tenant, $12 aggregate, $13 part of the error; null: any. The first row
-- is there even if nothing matches: it has the seq up to which was looked.
with page as materialized (
    select d.seq, d.id, d.type, d.topic, coalesce(d.key, d.aggregate_id) as key, d.died_at, d.cause, left(d.error, 1000) as error,
           d.tenant_id, d.aggregate_id
      from postroom.dead_letters d where d.route = $1 and d.seq > $2 and d.seq <= $3 order by d.seq limit $4
),
horizon as (select case when count(*) < $4 then $3 else max(p.seq) end as seq from page p)
select h.seq, m.seq, m.id, m.type, m.topic, m.key, (extract(epoch from m.died_at) * 1000)::bigint, m.cause, m.error,
       extract(epoch from clock_timestamp() - m.died_at)::float8, true
  from horizon h
  left join (
      select p.* from page p
       where ($5::uuid[] is null or p.id = any ($5))
         and ($6::bigint is null or p.died_at >= to_timestamp($6 / 1000.0))
         and ($7::bigint is null or p.died_at < to_timestamp($7 / 1000.0))
         and ($8::text is null or p.topic = $8)
         and ($9::text is null or p.type = $9)
         and ($10::text is null or p.key = $10)
         and ($11::text is null or p.tenant_id = $11)
         and ($12::text is null or p.aggregate_id = $12)
         and ($13::text is null or strpos(p.error, $13) > 0)) m on true
 order by m.seq
