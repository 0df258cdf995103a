-- Moves positions forward. Conditional on the epoch: a stale relay changes nothing, and sees it by the missing lane. So does
-- one whose tables were restored under it (at_home): owner and epoch may be in the backup too.
-- Locks in the order of lanes, like every statement on this table, so that none waits for another in a circle.
-- $1 route, $2 lanes, $3 epochs, $4 snapshots, $5 seqs, $6 floors, $7 catch-up snapshots, $8 catch-up seqs, $9 owner.
update postroom.lanes l
   set position_snapshot = p.snapshot, position_seq = p.seq, floor_seq = p.floor,
       catch_up_snapshot = p.catch_up, catch_up_seq = p.catch_up_seq, settled_at = clock_timestamp()
  from (select h.lane, p.snapshot, p.seq, p.floor, p.catch_up, p.catch_up_seq
          from postroom.lanes h
          join unnest($2::smallint[], $3::bigint[], $4::text[]::pg_snapshot[], $5::bigint[], $6::bigint[],
                      $7::text[]::pg_snapshot[], $8::bigint[])
                   as p (lane, epoch, snapshot, seq, floor, catch_up, catch_up_seq)
            on h.lane = p.lane and h.epoch = p.epoch
         where h.route = $1 and h.owner = $9 and postroom.at_home()
         order by h.lane for no key update of h) p
 where l.route = $1 and l.lane = p.lane
returning l.lane
