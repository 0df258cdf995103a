-- Deletes dead letters that their lane's position has passed; one that it has not would be read and sent again after a crash.
-- The keys that they blocked go on. $1 routes, $2 seqs; parallel arrays.
with gone as (
    delete from postroom.dead_letters d
     using unnest($1::text[], $2::bigint[]) as c (route, seq)
     where d.route = c.route and d.seq = c.seq
       and not exists (
               select from postroom.outbox o join postroom.lanes l on l.lane = o.lane
                where o.lane = d.lane and o.seq = d.seq and l.route = d.route
                  and not (o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot))
                  and not (l.catch_up_snapshot is not null and o.seq <= l.catch_up_seq
                           and pg_visible_in_snapshot(o.xid, l.catch_up_snapshot)))
    returning d.route, d.seq
),
freed as (
    delete from postroom.blocked_keys b using gone g where b.route = g.route and b.seq = g.seq
)
select route, seq from gone
