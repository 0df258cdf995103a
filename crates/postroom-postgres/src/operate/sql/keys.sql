-- Keys that wait, longest first. $1 route or null, $2 limit.
with waiting as (
    select p.route, p.ordering_key, count(*) as messages, min(p.seq) as first, min(p.parked_at) as since
      from postroom.parked p
     where p.state <> 'scheduled' and p.ordering_key is not null and ($1::text is null or p.route = $1)
     group by p.route, p.ordering_key
),
blocked as (
    select b.route, b.ordering_key, min(b.blocked_at) as since, bool_or(b.seq > 0) as by_dead,
           (array_agg(b.reason order by b.seq desc))[1] as reason, max(b.seq) as seq
      from postroom.blocked_keys b
     where $1::text is null or b.route = $1
     group by b.route, b.ordering_key
)
select coalesce(w.route, b.route), coalesce(w.ordering_key, b.ordering_key),
       case when b.route is null then 'retry' when b.by_dead then 'dead' else 'parked' end,
       coalesce((select d.id from postroom.dead_letters d where d.route = b.route and d.seq = b.seq), h.id)::text,
       coalesce(w.messages, 0),
       coalesce((select d.attempts from postroom.dead_letters d where d.route = b.route and d.seq = b.seq), h.attempts, 0)::bigint,
       extract(epoch from clock_timestamp() - least(w.since, b.since))::float8,
       case when b.route is null then greatest(extract(epoch from h.due_at - clock_timestamp()), 0)::float8 end,
       coalesce(b.reason, h.last_error)
  from waiting w full join blocked b on b.route = w.route and b.ordering_key = w.ordering_key
  left join postroom.parked h on h.route = w.route and h.seq = w.first
 order by least(w.since, b.since) limit $2
