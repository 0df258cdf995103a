-- Run once after a restore into another cluster, in a transaction that has locked the tables. By the numbers of the old cluster, the rows at or below a position that
-- it had not consumed are parked; rows above it stay fresh. Then every row gets an id older than any snapshot here.
insert into postroom.parked (route, seq, lane, ordering_key, state, attempts, due_at, last_error, id, topic, type, payload,
                             key, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                             aggregate_version, occurred_at)
select l.route, o.seq, o.lane, coalesce(o.key, o.aggregate_id), 'queued', 0, clock_timestamp(),
       'not yet consumed when the database was restored', o.id, o.topic, o.type, o.payload, o.key, o.routing_key,
       o.content_type, o.headers, o.tenant_id, o.aggregate_type, o.aggregate_id, o.aggregate_version, o.occurred_at
  from postroom.lanes l
  join postroom.routes r on r.name = l.route
  join postroom.outbox o on o.lane = l.lane and o.seq <= l.position_seq
 where not pg_visible_in_snapshot(o.xid, l.position_snapshot)
   and not (l.catch_up_snapshot is not null and o.seq <= l.catch_up_seq
            and pg_visible_in_snapshot(o.xid, l.catch_up_snapshot))
   and exists (select from unnest(r.topics) t
                where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))
    on conflict (route, seq) do nothing;
update postroom.parked p set state = 'retry'
 where p.state = 'queued'
   and (p.ordering_key is null
        or p.seq = (select min(q.seq) from postroom.parked q
                     where q.route = p.route and q.ordering_key = p.ordering_key and q.state <> 'scheduled'));
update postroom.outbox set xid = '3';
update postroom.lanes
   set position_snapshot = pg_current_snapshot(), catch_up_snapshot = null, catch_up_seq = null,
       floor_seq = greatest(position_seq, (select last_value from postroom.outbox_seq_seq)),
       owner = null, expires_at = null, epoch = epoch + 1;
update postroom.settings set system_identifier = (select system_identifier from pg_control_system());
