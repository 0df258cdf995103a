-- Parked messages that can go out: heads of their keys that are due, each with what queues behind it.
-- $1 route, $2 lanes held, $3 seqs already handed out, $4 limit of heads and of the whole, $5 limit of followers a head,
-- $6 bytes. Nothing of a blocked key.
-- Heads by (route, due_at), up to a clock that is stable: a volatile one is no condition for an index. A head in hand keeps its followers back. Followers by (route, ordering_key, seq), up to the
-- next head of the key, which waits for its own time: the first of them are read once for each head, as arrays, and cut there. With each, the relays that died over it and that may have, and the replay that it belongs to. Payloads are fetched only for what is handed out.
-- Statistics made while nothing was parked say that every index gives one row, so the planner may take any of them and read the whole table for
-- each head. What is written here leaves it one: without sorts (see the caller), only (route, ordering_key, seq) gives the order by key and seq of
-- a range of keys, which is one key. A subquery with a limit or an offset is looked up row by row.
with heads as (
    select p.seq, p.ordering_key, p.state from postroom.parked p
     where p.route = $1 and p.state <> 'queued' and p.due_at <= statement_timestamp() and p.lane = any ($2::smallint[])
       and p.seq <> all ($3::bigint[])
       and (select e.seq from postroom.parked e
             where e.route = $1 and e.ordering_key >= p.ordering_key and e.ordering_key <= p.ordering_key
               and e.state <> 'scheduled' and e.seq < p.seq
             order by e.ordering_key, e.seq limit 1) is null
       and (select b.ordering_key from postroom.blocked_keys b
             where b.route = $1 and b.ordering_key = p.ordering_key limit 1) is null
     order by p.due_at, p.seq limit $4
),
chosen as (
    select c.seq from (
        select h.seq from heads h
        union
        select q.seq from heads h cross join lateral (
            select b.seqs[1 : coalesce(array_position(b.retried, true) - 1, cardinality(b.seqs))] as seqs
              from (select array_agg(q.seq order by q.ordering_key, q.seq) as seqs,
                           array_agg(q.state = 'retry' order by q.ordering_key, q.seq) as retried
                      from (select q.ordering_key, q.seq, q.state from postroom.parked q
                             where q.route = $1 and q.ordering_key >= h.ordering_key and q.ordering_key <= h.ordering_key
                               and q.state <> 'scheduled' and q.seq > h.seq
                             order by q.ordering_key, q.seq limit $5) q) b) b
             cross join lateral unnest(b.seqs) as q (seq)
        where h.state = 'retry' and q.seq <> all ($3::bigint[])) c
     order by c.seq limit $4
),
weighed as (
    select c.seq, sum(octet_length(p.payload) + coalesce(octet_length(p.headers::text), 0) + 512)
                      over (order by c.seq rows between unbounded preceding and 1 preceding) as before
      from chosen c
     cross join lateral (select p.payload, p.headers from postroom.parked p where p.route = $1 and p.seq = c.seq offset 0) p
)
select p.lane, p.seq, p.ordering_key, p.attempts, p.id, p.topic, p.type, p.payload, p.key, p.routing_key, p.content_type,
       p.headers::text, p.tenant_id, p.aggregate_type, p.aggregate_id, p.aggregate_version, p.occurred_at,
       coalesce(s.deaths, 0) as deaths, coalesce(s.doubts, 0) as doubts,
       (select w.operation from postroom.operation_watch w
          join postroom.operations a on a.id = w.operation and a.kind = 'replay' and a.route = $1
         where w.message_id = p.id and w.seq = p.seq order by w.operation desc limit 1) as replay
  from weighed c cross join lateral (select * from postroom.parked p where p.route = $1 and p.seq = c.seq offset 0) p
       left join lateral (select s.deaths, s.doubts from postroom.suspects s
                           where s.route = $1 and s.lane = p.lane and s.seq = p.seq offset 0) s on true
 where coalesce(c.before, 0) < $6
 order by c.seq
