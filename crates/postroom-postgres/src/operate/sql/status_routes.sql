-- Unsettled messages of each route, by the same rule as the relay's read; each lane counted up to $1.
with found as (
    select l.route, o.occurred_at
      from postroom.lanes l
      join postroom.routes r on r.name = l.route
     cross join lateral (
         select u.topic, u.occurred_at from (
             (select f.topic, f.occurred_at from postroom.outbox f
               where f.lane = l.lane and f.seq > l.position_seq order by f.seq limit $1)
             union all
             (select o.topic, o.occurred_at from pg_snapshot_xip(l.position_snapshot) x (xid)
                join postroom.outbox o on o.xid = x.xid and o.lane = l.lane and o.seq <= l.position_seq limit $1)
             union all
             (select o.topic, o.occurred_at from postroom.outbox o
               where o.lane = l.lane and o.seq > l.floor_seq and o.seq <= l.position_seq
                 and o.xid >= pg_snapshot_xmax(l.position_snapshot) limit $1)) u
          limit $1) o
     where exists (select from unnest(r.topics) t
                    where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))
)
select r.name,
       (select count(*) from found f where f.route = r.name),
       (select extract(epoch from clock_timestamp() - min(f.occurred_at))::float8 from found f where f.route = r.name),
       (select count(*) from postroom.parked p where p.route = r.name),
       (select count(*) from postroom.parked p where p.route = r.name and p.state = 'scheduled'),
       (select count(*) from postroom.dead_letters d where d.route = r.name),
       (select count(*) from postroom.lanes l where l.route = r.name),
       (select count(*) from postroom.lanes l where l.route = r.name and l.owner is not null
                                                 and l.expires_at > clock_timestamp()),
       (select coalesce(array_agg(distinct l.owner), '{}') from postroom.lanes l
         where l.route = r.name and l.owner is not null and l.expires_at > clock_timestamp())
  from postroom.routes r
 order by r.name
