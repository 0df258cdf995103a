-- What became of the messages of rows that were taken. $1 intake, $2 after this place, $3 at most so many.
with batch as materialized (
    select r.place, r.row_key, r.id, r.state, r.at
      from postroom.intake_rows r
     where r.intake = $1 and r.state in ('taken', 'dead') and r.place > $2
     order by r.place limit $3
),
discarded as materialized (
    select i.id, min(a.actor || ': ' || a.reason) as by_whom
      from postroom.audit a cross join unnest(a.message_ids) i (id)
     where a.action in ('dead.discard', 'dead.expire') and a.at >= (select min(b.at) from batch b)
       and i.id in (select b.id from batch b)
     group by i.id
),
routes as materialized (
    select r.name, r.topics from postroom.routes r
)
select b.place, b.row_key, b.id, b.state,
       case when d.error is not null then 'dead'
            when x.by_whom is not null and (o.seq is null or f.finished = f.routes) then 'discarded'
            when o.seq is null then 'gone'
            when f.routes = 0 or f.finished < f.routes then 'waits'
            when f.unsure > 0 then 'unsure'
            else 'sent' end as fate,
       coalesce(d.error, x.by_whom) as error
  from batch b
  left join postroom.outbox o on o.id = b.id
  left join discarded x on x.id = b.id
  left join lateral (
      select coalesce(e.error, '') as error from postroom.dead_letters e where e.id = b.id order by e.route limit 1) d on true
 cross join lateral (
      select count(*) as routes,
             count(*) filter (where p.passed and not p.parked) as finished,
             -- Before the route began, before a restore, or while it did not take the topic, it was passed and perhaps not sent.
             count(*) filter (where p.passed and p.unsure) as unsure
        from routes r
        join postroom.lanes l on l.route = r.name and l.lane = o.lane
       cross join lateral (
           select o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot) as passed,
                  exists (select from postroom.parked q where q.route = r.name and q.seq = o.seq) as parked,
                  coalesce(o.seq <= l.rebased_seq, false)
                    or coalesce(o.seq <= l.start_seq and pg_visible_in_snapshot(o.xid, l.start_snapshot), false)
                    or exists (select from postroom.route_revisions v
                                 join postroom.route_revisions n on n.route = v.route and n.revision = v.revision + 1
                                where v.route = r.name and n.set_at >= b.at
                                  and not exists (select from unnest(v.topics) t
                                                   where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))) as unsure) p
       where exists (select from unnest(r.topics) t where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))) f
 order by b.place
