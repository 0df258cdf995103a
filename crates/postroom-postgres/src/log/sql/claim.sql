-- What is new to each of our lanes, under one snapshot.
--
-- $1 lanes, $2 position seqs, $3 floors, $4 position snapshots, $5 catch-up snapshots (null: none), $6 catch-up seqs,
-- $7 limits; parallel arrays, one element a lane. $8 route, $9 bytes. $10 oldest xmax of the snapshots and $11 highest floor of
-- those lanes that are not catching up and have a floor (null: none). $12 the highest seq that was parked or dead when the lanes
-- were taken, $13 whether the route may have parked messages, as this relay knows it; that an operator parks a key is seen at once.
--
-- fresh: seq above the position, in order, on (lane, seq).
-- late:  seq up to the position, not visible in the position's snapshot, visible now:
--        - of transactions that were in progress in that snapshot and are no more, on (xid, lane, seq);
--        - of transactions that had an id, or got one, when the snapshot was taken without being listed in it
--          (xid >= xmax: it had not completed, nor had any later one). Their seqs lie above the floor; on (lane, seq).
--        While a catch-up runs, only what its snapshot sees, after its seq, and nothing fresh.
--
-- astray: of such transactions, but at or below the floor: the sequence went back. Such a row is never passed by; the read
--        is thrown away and postroom.mend() gives the row a new place. Together the three find every row there is. So is a read
--        that finds or has read a row above the sequence: nothing is lost by it yet, but order may be.
--
-- Nothing is read either from tables that are not those that the positions were learnt from: a restore may be under way.
--
-- Topics are those that the route has when the read takes its snapshot, whatever this relay was started with.
--
-- Plan: a nested loop over at most as many lanes as we hold; each branch an index scan that stops at its limit. Late
-- branches read one row more than the limit, which tells that there is more.
-- The first row has lane -1, what the sequence has come to as seq, the snapshot as topic, as `astray` whether rows are, and as
-- `wanted` whether the route is registered.
-- Bytes: beyond $9 rows come without payload, as `cut`; of each lane those are its last ones. The first row is never cut.
with at as materialized (
    select pg_current_snapshot() as snapshot,
           clock_timestamp() as clock,
           $13::boolean or exists (select from postroom.blocked_keys where route = $8) as any_parked,
           (select array(select replace(replace(replace(rtrim(t, '*'), '\', '\\'), '%', '\%'), '_', '\_')
                                || case when t like '%*' then '%' else '' end
                           from unnest(r.topics) t)
              from postroom.routes r where r.name = $8) as likes
),
held as (
    select * from unnest($1::smallint[], $2::bigint[], $3::bigint[], $4::text[]::pg_snapshot[], $5::text[]::pg_snapshot[],
                         $6::bigint[], $7::bigint[])
        as h (lane, seq, floor, snapshot, catch_up, catch_up_seq, n)
),
recent as materialized (
    select o.xid, o.lane, o.seq from postroom.outbox o where o.xid >= $10::text::xid8 and o.seq <= $11::bigint
),
astray as materialized (
    select exists (select from recent r join held h on h.lane = r.lane
                    where h.catch_up is null and r.seq <= h.floor and r.xid >= pg_snapshot_xmax(h.snapshot))
        or postroom.at_home() is not true as any
),
found as (
    select o.*, false as late
      from held h cross join lateral (
          select * from postroom.outbox f
           where f.lane = h.lane and f.seq > h.seq
           order by f.seq limit case when h.catch_up is null then h.n else 0 end) o
    union all
    select o.*, true
      from held h cross join lateral (
          select * from (
              (select l.* from at cross join pg_snapshot_xip(h.snapshot) x (xid) cross join lateral (
                   select * from postroom.outbox o
                    where o.xid = x.xid and o.lane = h.lane and o.seq > coalesce(h.catch_up_seq, 0) and o.seq <= h.seq
                      and (h.catch_up is null or pg_visible_in_snapshot(o.xid, h.catch_up))
                    order by o.seq limit h.n + 1) l
                where pg_visible_in_snapshot(x.xid, at.snapshot))
              union all
              (select * from postroom.outbox o
                where o.lane = h.lane and o.seq > greatest(h.floor, coalesce(h.catch_up_seq, 0)) and o.seq <= h.seq
                  and o.xid >= pg_snapshot_xmax(h.snapshot)
                  and (h.catch_up is null or pg_visible_in_snapshot(o.xid, h.catch_up))
                order by o.seq limit h.n + 1)
          ) either order by either.seq limit h.n + 1) o
),
weighed as (
    select f.*, w.wanted, w.astray,
           sum(case when w.wanted then octet_length(f.payload) + coalesce(octet_length(f.headers::text), 0) + 512 else 0 end)
               over (order by f.seq rows between unbounded preceding and 1 preceding) >= $9 as heavy
      from found f cross join at cross join lateral (
          select coalesce(f.topic like any (at.likes), false)
             -- Parked or buried before a crash kept the position from passing it.
             and not ((f.late or f.seq <= $12::bigint)
                      and (exists (select from postroom.parked p where p.route = $8 and p.seq = f.seq and p.id = f.id)
                           or exists (select from postroom.dead_letters d
                                       where d.route = $8 and d.seq = f.seq and d.id = f.id))) as wanted,
                 -- Its seq is that of another message, which waits or is dead.
                 (f.late or f.seq <= $12::bigint)
             and (exists (select from postroom.parked p where p.route = $8 and p.seq = f.seq and p.id <> f.id)
                  or exists (select from postroom.dead_letters d
                              where d.route = $8 and d.seq = f.seq and d.id <> f.id)) as astray) w
)
select (-1)::smallint as lane,
       (select s.last_value - (not s.is_called)::int from postroom.outbox_seq_seq s) as seq, false as late, at.likes is not null as wanted, false as scheduled,
       false as behind, false as cut, astray.any as astray,
       null::uuid as id, at.snapshot::text as topic, null::text as type, null::bytea as payload, null::text as key,
       null::text as routing_key, null::text as content_type, null::text as headers, null::text as tenant_id,
       null::text as aggregate_type, null::text as aggregate_id, null::bigint as aggregate_version,
       null::timestamptz as occurred_at
  from at cross join astray
union all
(select f.lane, f.seq, f.late, f.wanted, coalesce(f.visible_at > at.clock, false),
       case when at.any_parked and f.wanted and coalesce(f.key, f.aggregate_id) is not null
            then exists (select from postroom.parked p
                          where p.route = $8 and p.ordering_key = coalesce(f.key, f.aggregate_id)
                            and p.state <> 'scheduled')
              or exists (select from postroom.blocked_keys b
                          where b.route = $8 and b.ordering_key = coalesce(f.key, f.aggregate_id))
            else false end,
       coalesce(f.heavy, false), f.astray,
       f.id, f.topic, f.type, case when f.wanted and f.heavy is not true then f.payload end, f.key, f.routing_key,
       f.content_type, f.headers::text, f.tenant_id, f.aggregate_type, f.aggregate_id, f.aggregate_version, f.occurred_at
  from weighed f cross join at
 order by f.seq)
