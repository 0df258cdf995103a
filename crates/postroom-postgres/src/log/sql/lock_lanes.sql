-- Which of our lanes are still ours; the lock keeps a takeover away until this transaction ends, and not our own renewal.
-- None when the tables were restored or made anew since: owners and epochs in them are of another history.
-- $1 route, $2 lanes, $3 epochs, $4 owner.
select l.lane from postroom.lanes l
  join unnest($2::smallint[], $3::bigint[]) as p (lane, epoch) on l.lane = p.lane and l.epoch = p.epoch
 where l.route = $1 and l.owner = $4 and postroom.at_home()
 order by l.lane for key share of l
