-- Takes the note off messages that are not alone with the sink any more; forgets what is known of those that are through.
-- Conditional on the epoch: it may be another relay's note by now.
-- $1 route, $2 lane, $3 epoch, $4 owner, $5 seq, $6 whether it is through.
with ours as (
    select l.lane from postroom.lanes l where l.route = $1 and l.lane = $2 and l.epoch = $3 and l.owner = $4
),
forgotten as (
    delete from postroom.suspects s using ours where $6 and s.route = $1 and s.lane = ours.lane and s.seq = $5
)
update postroom.suspects s set alone = false
  from ours where not $6 and s.route = $1 and s.lane = ours.lane and s.seq = $5 and s.alone
