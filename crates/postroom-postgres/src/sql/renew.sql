-- Extends the lease on lanes held ($3, $4 epochs), and takes lanes that are free, expired, or ours under an epoch that we no
-- longer know, with a new epoch. Time is the database's. $1 route, $2 owner, $5 lease in milliseconds.
-- A recording transaction holds `for key share` on its lanes (lock_lanes.sql): it does not hold up our own renewal
-- (`no key update`), but a takeover (`update`) passes it by and comes again.
with held as (
    select l.lane
      from postroom.lanes l join unnest($3::smallint[], $4::bigint[]) as h (lane, epoch)
        on h.lane = l.lane and h.epoch = l.epoch
     where l.route = $1 and l.owner = $2
     order by l.lane
       for no key update of l
),
taken as (
    select l.lane
      from postroom.lanes l
     where l.route = $1
       and (l.owner is null or l.expires_at < clock_timestamp() or l.owner = $2)
       and not exists (select from unnest($3::smallint[], $4::bigint[]) as h (lane, epoch)
                        where h.lane = l.lane and h.epoch = l.epoch and l.owner = $2)
     order by l.lane
       for update of l skip locked
),
mine as (select lane, true as kept from held union all select lane, false from taken)
update postroom.lanes l
   set owner = $2, expires_at = clock_timestamp() + $5::bigint * interval '1 millisecond',
       epoch = case when mine.kept then l.epoch else l.epoch + 1 end
  from mine
 where l.route = $1 and l.lane = mine.lane
returning l.lane, l.epoch, mine.kept, l.position_snapshot::text, l.position_seq, l.floor_seq, l.catch_up_snapshot::text,
          l.catch_up_seq
