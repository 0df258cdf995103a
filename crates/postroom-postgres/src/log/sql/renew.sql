-- Says that this relay is alive, extends the lease on lanes held ($3, $4 epochs), and takes lanes that are free, expired, or
-- ours under an epoch that we no longer know, with a new epoch, up to its share: lanes divided by relays, rounded up.
-- Time is the database's. $1 route, $2 owner, $5 lease in milliseconds, $6 why the sink is down or null, $7 whether what
-- killed earlier relays is behind us, $8 relays that were silent for a lease as this one saw it: their lanes are taken although
-- the database's clock, which may have gone back, says that their leases run, $9 what it publishes to, $10 whether that is blocked
-- rather than down. A takeover from a dead owner counts as a death
-- only if it may have had something of the lane in flight: one that died idle died over nothing. The first row has lane -1 and
-- the share as epoch.
-- Nothing is kept or taken of tables that were restored meanwhile: at_home().
-- A recording transaction holds `for key share` on its lanes (lock_lanes.sql): it does not hold up our own renewal
-- (`no key update`), but a takeover (`update`) passes it by and comes again.
with present as (
    insert into postroom.relays as r (route, owner, expires_at, lease_ms, sink_down_since, sink_error, sink, sink_blocked)
    values ($1, $2, clock_timestamp() + $5::bigint * interval '1 millisecond', $5::bigint,
            case when $6::text is not null then clock_timestamp() end, $6, $9, $10)
        on conflict (route, owner) do update
           set expires_at = excluded.expires_at, lease_ms = excluded.lease_ms, sink_error = excluded.sink_error,
               sink = excluded.sink, sink_blocked = excluded.sink_blocked,
               sink_down_since = case when excluded.sink_error is not null
                                      then coalesce(r.sink_down_since, excluded.sink_down_since) end
    returning 1
),
gone as (
    delete from postroom.relays r
     using (select g.owner from postroom.relays g
             where g.route = $1 and g.owner <> $2 and g.expires_at < clock_timestamp() - interval '1 hour'
               for update of g skip locked) g
     where r.route = $1 and r.owner = g.owner
    returning 1
),
share as (
    select ceil(s.lanes::numeric / (1 + (select count(*) from postroom.relays r
                                          where r.route = $1 and r.owner <> $2 and r.owner <> all ($8::text[])
                                            and r.expires_at > clock_timestamp())))::bigint
               as lanes
      from postroom.settings s
),
held as (
    select l.lane
      from postroom.lanes l join unnest($3::smallint[], $4::bigint[]) as h (lane, epoch)
        on h.lane = l.lane and h.epoch = l.epoch
     where l.route = $1 and l.owner = $2 and postroom.at_home()
     order by l.lane
       for no key update of l
),
taken as (
    select l.lane, coalesce(l.owner <> $2, false) as orphaned
      from postroom.lanes l
     where l.route = $1 and postroom.at_home()
       and (l.owner is null or l.expires_at < clock_timestamp() or l.owner = $2 or l.owner = any ($8::text[]))
       and not exists (select from unnest($3::smallint[], $4::bigint[]) as h (lane, epoch)
                        where h.lane = l.lane and h.epoch = l.epoch and l.owner = $2)
     order by l.lane
     limit (select greatest(share.lanes - cardinality($3::smallint[]), 0) from share)
       for update of l skip locked
),
-- What can have been in flight of an orphaned lane: a row above the position, a late one (by the rules of claim.sql, and by its
-- indexes; one is enough), or a parked one that is due. The parked lanes are read once for all.
fallen as (
    select t.lane,
           case when t.orphaned then (
               l.catch_up_seq is not null
               or exists (select from postroom.outbox o where o.lane = l.lane and o.seq > l.position_seq)
               or l.lane in (select p.lane from postroom.parked p
                              where p.route = $1 and p.state <> 'queued' and p.due_at <= clock_timestamp())
               -- The limit keeps it a look-up by xid: joined, the whole history of the lane would be read.
               or exists (select from pg_snapshot_xip(l.position_snapshot) x (xid) cross join lateral (
                              select from postroom.outbox o
                               where o.xid = x.xid and o.lane = l.lane and o.seq <= l.position_seq
                               order by o.seq limit 1) late)
               or exists (select from postroom.outbox o
                           where o.lane = l.lane and o.seq > l.floor_seq and o.seq <= l.position_seq
                             and o.xid >= pg_snapshot_xmax(l.position_snapshot))
           )::int else 0 end as died
      from taken t join postroom.lanes l on l.route = $1 and l.lane = t.lane
),
blamed as (
    update postroom.suspects s
       set deaths = s.deaths + s.proven::int, doubts = s.doubts + (not s.proven)::int, alone = false
      from taken t
     where s.route = $1 and s.lane = t.lane and s.alone and t.orphaned
),
-- Not what is parked: it was set aside, and has not been tried since.
cleared as (
    delete from postroom.suspects s using held h
     where $7 and s.route = $1 and s.lane = h.lane and not s.alone
       and not exists (select from postroom.parked p where p.route = s.route and p.seq = s.seq)
),
-- Materialized, or it is inlined as a plain union, of which PostgreSQL keeps no row for the recheck after a concurrent
-- update: a position written meanwhile would make `renewed` skip the lane, and the relay would take it for lost.
mine as materialized (select lane, true as kept, 0 as died from held union all select lane, false, died from fallen),
renewed as (
    update postroom.lanes l
       set owner = $2, expires_at = clock_timestamp() + $5::bigint * interval '1 millisecond',
           epoch = case when mine.kept then l.epoch else l.epoch + 1 end,
           deaths = case when mine.kept and $7 then 0 else least(l.deaths + mine.died, 100) end
      from mine
     where l.route = $1 and l.lane = mine.lane
    returning l.lane, l.epoch, mine.kept, l.position_snapshot::text, l.position_seq, l.floor_seq,
              l.catch_up_snapshot::text, l.catch_up_seq, l.deaths
)
select (-1)::smallint, share.lanes, false, null::text, null::bigint, null::bigint, null::text, null::bigint, null::int
  from share, present, (select count(*) from gone) g
union all
select * from renewed
