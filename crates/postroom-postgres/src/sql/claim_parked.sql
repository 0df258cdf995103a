-- Parked messages that can go out: heads of their keys that are due, each with what queues behind it.
-- $1 route, $2 lanes held, $3 seqs already handed out, $4 limit of heads, $5 limit of followers a head.
-- Heads by (route, due_at); a head in hand keeps its followers back. Followers by (route, ordering_key, seq), up to the
-- next head of the key.
with heads as (
    select p.* from postroom.parked p
     where p.route = $1 and p.state <> 'queued' and p.due_at <= clock_timestamp() and p.lane = any ($2::smallint[])
       and p.seq <> all ($3::bigint[])
       and (p.ordering_key is null or not exists (
               select from postroom.parked e
                where e.route = p.route and e.ordering_key = p.ordering_key and e.state <> 'scheduled' and e.seq < p.seq))
     order by p.due_at, p.seq limit $4
)
select h.* from heads h
union all
select q.* from heads h cross join lateral (
    select * from postroom.parked q
     where q.route = $1 and q.ordering_key = h.ordering_key and q.state = 'queued' and q.seq > h.seq
       and q.seq <> all ($3::bigint[])
     order by q.seq limit $5) q
where h.state = 'retry'
order by seq
