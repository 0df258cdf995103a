-- Relays that are alive, and those that own lanes although their lease is over; 1,000 at most.
select coalesce(r.route, l.route), coalesce(r.owner, l.owner), coalesce(r.expires_at > clock_timestamp(), l.held > 0),
       extract(epoch from clock_timestamp() - (r.expires_at - r.lease_ms * interval '1 millisecond'))::float8,
       coalesce(l.lanes, 0), r.sink, r.sink_blocked,
       extract(epoch from clock_timestamp() - r.sink_down_since)::float8, r.sink_error
  from postroom.relays r
  full join (select l.route, l.owner, count(*) as lanes, count(*) filter (where l.expires_at > clock_timestamp()) as held
               from postroom.lanes l where l.owner is not null group by l.route, l.owner) l
    on l.route = r.route and l.owner = r.owner
 where r.expires_at > clock_timestamp() or l.lanes > 0
 order by 1, 2 limit 1000
