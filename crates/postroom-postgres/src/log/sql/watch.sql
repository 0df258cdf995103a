-- Whether positions still mean what they meant, and what the route is now. $1 route, $2 owner.
-- One row; none: the settings are missing. With the other relays of the route comes the end of
-- their lease as it stands: an owner whose lease does not change is silent, whatever the clocks say.
select postroom.at_home() is true as at_home,
       s.incarnation,
       -- One look-up a lane. What the snapshot shows was drawn before, so a healthy sequence is never behind it.
       (select q.last_value - (not q.is_called)::int from postroom.outbox_seq_seq q)
           < coalesce((select max(greatest(l.position_seq, l.floor_seq, o.seq))
                         from postroom.lanes l
                        cross join lateral (select max(o.seq) as seq from postroom.outbox o where o.lane = l.lane) o
                        where l.route = $1), 0)
           as sequence_behind,
       (extract(epoch from clock_timestamp()) * 1000)::bigint as clock_ms,
       pg_backend_pid() as backend,
       r.name is not null and s.lanes <= (select count(*) from postroom.lanes l where l.route = $1) as registered, r.topics, r.ordering, r.on_dead, r.revision,
       -- As in refresh_statistics(), which is called then.
       exists (select from pg_class c
                where c.relnamespace = (select n.oid from pg_namespace n where n.nspname = 'postroom')
                  and c.relname in ('parked', 'dead_letters', 'blocked_keys', 'suspects', 'operation_watch', 'inbox_messages', 'dead_consume')
                  and c.relkind = 'r' and pg_stat_get_live_tuples(c.oid) > 100 + 4 * greatest(c.reltuples, 0)) as statistics_stale,
       o.owners, o.leases, o.lease_ms
  from postroom.settings s
  left join postroom.routes r on r.name = $1
 cross join (select coalesce(array_agg(e.owner), '{}') as owners, coalesce(array_agg(coalesce(u.until, '')), '{}') as leases,
                    coalesce(array_agg(y.lease_ms), '{}') as lease_ms
               from (select l.owner from postroom.lanes l where l.route = $1 and l.owner <> $2
                      union
                     select r.owner from postroom.relays r where r.route = $1 and r.owner <> $2) e
               left join postroom.relays y on y.route = $1 and y.owner = e.owner
              cross join lateral (
                     select coalesce(y.expires_at, (select max(l.expires_at) from postroom.lanes l
                                                     where l.route = $1 and l.owner = e.owner))::text as until) u) o
