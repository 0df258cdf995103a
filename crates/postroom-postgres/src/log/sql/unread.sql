-- Right after lanes were taken, and before anything is claimed in them: messages that the relay before had read and only
-- queued up, without its position having passed them, are deleted from the parked ones. They are read again, in order with
-- those before them that it had in hand; left parked, they could go out before those. A statement of its own, because the
-- one that takes the lanes does not see what the relay before recorded until the moment its lanes were taken.
-- $1 route, $2 lanes, $3 epochs, $4 owner.
delete from postroom.parked p
 using unnest($2::smallint[], $3::bigint[]) as t (lane, epoch), postroom.lanes l, postroom.outbox o
 where p.route = $1 and p.lane = t.lane and p.state <> 'scheduled' and p.attempts = 0 and p.last_error is null
   and l.route = $1 and l.lane = t.lane and l.epoch = t.epoch and l.owner = $4
   and o.lane = p.lane and o.seq = p.seq
   and not (o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot))
   and not (l.catch_up_snapshot is not null and o.seq <= l.catch_up_seq
            and pg_visible_in_snapshot(o.xid, l.catch_up_snapshot))
