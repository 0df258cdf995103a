-- Whether a relay of these routes would find something to do now, by the same rule as the relay's read, whatever the topics: a position passes
-- rows of other topics only when a relay reads them.
--
-- $1 routes. A route that is not registered counts: it takes what is there once it is. Plan: for each lane at most one row of each branch.
select exists (select from unnest($1::text[]) n (name) where not exists (select from postroom.routes r where r.name = n.name))
    or exists (select from postroom.lanes l
                where l.route = any ($1::text[])
                  and (exists (select from postroom.outbox o where o.lane = l.lane and o.seq > l.position_seq)
                       or exists (select from pg_snapshot_xip(l.position_snapshot) x (xid)
                                   cross join lateral (select from postroom.outbox o
                                                        where o.xid = x.xid and o.lane = l.lane and o.seq <= l.position_seq limit 1) late)
                       or exists (select from postroom.outbox o
                                   where o.lane = l.lane and o.seq > l.floor_seq and o.seq <= l.position_seq
                                     and o.xid >= pg_snapshot_xmax(l.position_snapshot))))
    or exists (select from unnest($1::text[]) n (name)
                cross join lateral (select from postroom.parked p
                                     where p.route = n.name and p.state <> 'queued' and p.due_at <= statement_timestamp()
                                       and not exists (select from postroom.blocked_keys b
                                                        where b.route = p.route and b.ordering_key = p.ordering_key)
                                     limit 1) due)
