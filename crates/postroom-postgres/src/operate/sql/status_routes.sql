-- What each route has left, by the same rule as the relay's read. Bounded in all: $1 rows of the outbox are looked at over all lanes,
-- and $2 parked and dead ones over all routes, each with a share that is at least 50 a lane and 1,000 a route. What is cut is a lower
-- bound and says so. The oldest is the oldest of those looked at: fresh rows come in their order, and so do the first 1,000 parked ones.
with share as (
    select greatest(50, $1::bigint / greatest((select count(*) from postroom.lanes), 1)) as lane,
           greatest(1000, $2::bigint / greatest((select count(*) from postroom.routes), 1)) as route
)
select r.name, b.backlog, b.cut, extract(epoch from clock_timestamp() - least(b.since, w.since))::float8, p.parked, p.parked >= s.route, q.scheduled, q.looked >= s.route, d.dead,
       d.dead >= s.route, n.lanes, n.held, b.unread, q.retrying, q.looked >= s.route, e.last_error
  from postroom.routes r
 cross join share s
 cross join lateral (
     select coalesce(sum(u.matching), 0)::bigint as backlog, coalesce(bool_or(u.looked >= s.lane), false) as cut,
            min(u.oldest) as since,
            extract(epoch from clock_timestamp() - min(u.unread))::float8 as unread
       from postroom.lanes l
      cross join lateral (
          select count(*) as looked, count(*) filter (where f.takes) as matching,
                 min(f.occurred_at) filter (where f.takes) as oldest, min(f.occurred_at) as unread
            from (select o.occurred_at,
                         exists (select from unnest(r.topics) t
                                  where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1)))) as takes
                    from ((select o.topic, o.occurred_at from postroom.outbox o
                            where o.lane = l.lane and o.seq > l.position_seq order by o.seq limit s.lane)
                          union all
                          -- The limit keeps it a look-up by xid: joined, the whole history of the lane would be read.
                          (select late.topic, late.occurred_at
                             from pg_snapshot_xip(l.position_snapshot) x (xid)
                            cross join lateral (
                                select o.topic, o.occurred_at from postroom.outbox o
                                 where o.xid = x.xid and o.lane = l.lane and o.seq <= l.position_seq
                                 order by o.seq limit s.lane) late
                            limit s.lane)
                          union all
                          (select o.topic, o.occurred_at from postroom.outbox o
                            where o.lane = l.lane and o.seq > l.floor_seq and o.seq <= l.position_seq
                              and o.xid >= pg_snapshot_xmax(l.position_snapshot) limit s.lane)) o
                   limit s.lane) f) u
      where l.route = r.name) b
 cross join lateral (
     select count(*) as parked from (select from postroom.parked p where p.route = r.name limit s.route) p) p
 cross join lateral (
     -- Without what is replayed: that was sent before.
     select min(p.occurred_at) as since
       from ((select p.occurred_at, p.state, p.seq, p.id from postroom.parked p where p.route = r.name order by p.seq limit 1000)
             union all
             (select p.occurred_at, p.state, p.seq, p.id from postroom.parked p where p.route = r.name and p.state <> 'scheduled' limit 1000)) p
      where p.state <> 'scheduled'
        and not exists (select from postroom.operation_watch w join postroom.operations o on o.id = w.operation and o.kind = 'replay'
                         where w.message_id = p.id and w.seq = p.seq)) w
 cross join lateral (
     select count(*) as looked, count(*) filter (where p.state = 'scheduled') as scheduled,
            count(*) filter (where p.state = 'retry' and p.failed) as retrying
       from (select p.state, p.last_error is not null as failed from postroom.parked p where p.route = r.name and p.state <> 'queued'
              order by p.due_at desc limit s.route) p) q
  left join lateral (
     select f.last_error
       from (select p.state, p.last_error, p.due_at from postroom.parked p
              where p.route = r.name and p.state <> 'queued' order by p.due_at desc limit 1000) f
      where f.state = 'retry' and f.last_error is not null order by f.due_at desc limit 1) e on true
 cross join lateral (
     select count(*) as dead from (select from postroom.dead_letters d where d.route = r.name limit s.route) d) d
 cross join lateral (
     select count(*) as lanes, count(*) filter (where l.expires_at > clock_timestamp()) as held
       from postroom.lanes l where l.route = r.name) n
 order by r.name
