-- Gives lanes back at once, so that another relay can take them; what is suspected there without a death is forgotten.
-- $1 route, $2 lanes, $3 epochs, $4 owner.
with forgotten as (
    delete from postroom.suspects s
     using unnest($2::smallint[]) as p (lane)
     where s.route = $1 and s.lane = p.lane and s.deaths = 0 and s.doubts = 0
),
unmarked as (
    update postroom.suspects s set alone = false
      from unnest($2::smallint[]) as p (lane)
     where s.route = $1 and s.lane = p.lane and s.alone and (s.deaths > 0 or s.doubts > 0)
)
update postroom.lanes l
   set owner = null, expires_at = null
  from (select h.lane from postroom.lanes h
          join unnest($2::smallint[], $3::bigint[]) as p (lane, epoch) on h.lane = p.lane and h.epoch = p.epoch
         where h.route = $1 and h.owner = $4
         order by h.lane for no key update of h) p
 where l.route = $1 and l.lane = p.lane
