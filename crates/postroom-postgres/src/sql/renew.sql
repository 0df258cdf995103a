-- Extends the lease on lanes held ($3, $4 epochs), and takes lanes that are free or expired, with a new epoch.
-- Time is the database's. $1 route, $2 owner, $5 lease in milliseconds.
with mine as (
    select l.lane,
           l.owner = $2 and exists (select from unnest($3::smallint[], $4::bigint[]) h (lane, epoch)
                                     where h.lane = l.lane and h.epoch = l.epoch) as kept
      from postroom.lanes l
     where l.route = $1
       and (l.owner is null or l.expires_at < clock_timestamp()
            or (l.owner = $2 and exists (select from unnest($3::smallint[], $4::bigint[]) h (lane, epoch)
                                          where h.lane = l.lane and h.epoch = l.epoch)))
     order by l.lane
       for update
)
update postroom.lanes l
   set owner = $2, expires_at = clock_timestamp() + $5::bigint * interval '1 millisecond',
       epoch = case when mine.kept then l.epoch else l.epoch + 1 end
  from mine
 where l.route = $1 and l.lane = mine.lane
returning l.lane, l.epoch, mine.kept, l.position_snapshot::text, l.position_seq, l.floor_seq, l.catch_up_snapshot::text,
          l.catch_up_seq
