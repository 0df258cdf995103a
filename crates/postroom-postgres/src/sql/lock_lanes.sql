-- Which of our lanes are still ours; the share lock keeps a takeover waiting until this transaction ends.
-- $1 route, $2 lanes, $3 epochs.
select l.lane from postroom.lanes l
  join unnest($2::smallint[], $3::bigint[]) as p (lane, epoch) on l.lane = p.lane and l.epoch = p.epoch
 where l.route = $1
 order by l.lane for share of l
