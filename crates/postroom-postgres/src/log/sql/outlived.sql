-- This relay lives, although lanes were taken from it as from a dead one (its lease had run out while it could not reach the store):
-- those deaths are taken back. $1 route, $2 lanes, $3 the epochs under which they were ours.
-- Lanes are locked in their order, as renew.sql does it.
with taken as (
    select l.lane
      from postroom.lanes l join unnest($2::smallint[], $3::bigint[]) as o (lane, epoch) on o.lane = l.lane
     where l.route = $1 and l.epoch > o.epoch and postroom.at_home()
     order by l.lane
       for no key update of l
),
forgiven as (
    update postroom.lanes l set deaths = l.deaths - 1 from taken t where l.route = $1 and l.lane = t.lane and l.deaths > 0
)
update postroom.suspects s
   set deaths = greatest(s.deaths - 1, 0), doubts = case when s.deaths > 0 then s.doubts else greatest(s.doubts - 1, 0) end
  from taken t
 where s.route = $1 and s.lane = t.lane and (s.deaths > 0 or s.doubts > 0)
