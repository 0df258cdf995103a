-- One message on every route that has run. $1 id.
with found as (
    select o.seq, o.lane, o.topic, coalesce(o.key, o.aggregate_id) as key, o.xid, o.visible_at, true as kept
      from postroom.outbox o where o.id = $1
    union all
    select q.seq, q.lane, q.topic, coalesce(q.key, q.aggregate_id), null, null, false
      from (select * from (select route, seq, lane, topic, key, aggregate_id, id from postroom.parked where id = $1
                           union all
                           select route, seq, lane, topic, key, aggregate_id, id from postroom.dead_letters where id = $1) as either
             limit 1) q
     where not exists (select from postroom.outbox where id = $1)
)
select r.name, f.key,
       exists (select from unnest(r.topics) t
                where f.topic = t or (t like '%*' and starts_with(f.topic, left(t, -1)))) as taken,
       not f.kept
         or (f.seq <= l.position_seq and pg_visible_in_snapshot(f.xid, l.position_snapshot))
         or (l.catch_up_snapshot is not null and f.seq <= l.catch_up_seq
             and pg_visible_in_snapshot(f.xid, l.catch_up_snapshot)) as passed,
       p.state, p.attempts::bigint as attempts, p.last_error,
       greatest(extract(epoch from p.due_at - clock_timestamp()), 0)::float8 as due_in,
       p.history::text as parked_history,
       (select h.id::text from postroom.parked h
         where h.route = r.name and h.ordering_key = f.key and h.state <> 'scheduled' and h.seq < f.seq
         order by h.seq limit 1) as behind,
       coalesce((select c.state from postroom.parked c where c.route = r.name and c.seq >= 4611686018427387904 and c.seq <> f.seq and c.id = $1
                  limit 1),
                (select 'dead' from postroom.dead_letters c where c.route = r.name and c.id = $1 and c.seq <> f.seq limit 1)) as copy,
       d.attempts::bigint as dead_attempts, d.cause, d.error, extract(epoch from clock_timestamp() - d.died_at)::float8 as died_ago,
       d.history::text as dead_history,
       b.reason as blocked_because, extract(epoch from clock_timestamp() - b.blocked_at)::float8 as blocked_for,
       b.seq as blocked_seq,
       case when l.expires_at > clock_timestamp() then l.owner end as owner,
       y.sink_error, y.sink_blocked, extract(epoch from clock_timestamp() - y.sink_down_since)::float8 as sink_down_for,
       (select count(*) from (select from postroom.outbox e
                               where e.lane = f.lane and e.seq > l.position_seq and e.seq < f.seq limit 10000) e) as before,
       greatest(extract(epoch from f.visible_at - clock_timestamp()), 0)::float8 as visible_in,
       l.deaths,
       f.kept and f.seq <= l.rebased_seq as before_rebase,
       f.kept and f.seq <= l.start_seq and pg_visible_in_snapshot(f.xid, l.start_snapshot) as before_start,
       exists (select from postroom.route_revisions v
                where v.route = r.name
                  and exists (select from unnest(v.topics) t
                               where f.topic = t or (t like '%*' and starts_with(f.topic, left(t, -1))))) as was_taken,
       (select a.actor || ' ' || to_char(a.at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') || ': ' || a.reason
          from postroom.audit a
         where a.action = 'dead.discard' and a.message_ids @> array[$1::uuid]
           and (a.filter ->> 'route' = r.name
                or (a.filter ->> 'route' is null and not exists (select from postroom.routes s where s.name <> r.name)))
         order by a.id desc limit 1) as discarded,
       (select a.actor || ' ' || to_char(a.at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') || ': ' || a.reason
          from postroom.audit a where a.action = 'route.forget' and a.filter ->> 'route' = r.name
         order by a.id desc limit 1) as forgotten,
       -- The audit row names no route, and there are several: it may have been dead on another one.
       exists (select from postroom.audit a
                where a.action = 'dead.discard' and a.message_ids @> array[$1::uuid] and a.filter ->> 'route' is null) as discarded_somewhere,
       exists (select from postroom.archive_restored a where a.id = $1) as came_back,
       exists (select from postroom.operations o where o.route = r.name and o.kind = 'replay' and o.side = 'out') as replayed,
       exists (select from postroom.route_revisions v
                where v.route = r.name and v.revision < r.revision
                  and not exists (select from unnest(v.topics) t
                                   where f.topic = t or (t like '%*' and starts_with(f.topic, left(t, -1))))) as topic_is_newer
  from found f
 cross join postroom.routes r
  join postroom.lanes l on l.route = r.name and l.lane = f.lane
  left join postroom.parked p on p.route = r.name and p.seq = f.seq
  left join postroom.dead_letters d on d.route = r.name and d.seq = f.seq
  left join lateral (select * from postroom.blocked_keys k where k.route = r.name and k.ordering_key = f.key
                      order by k.seq desc limit 1) b on true
  left join postroom.relays y on y.route = r.name and y.owner = l.owner
 order by r.name
