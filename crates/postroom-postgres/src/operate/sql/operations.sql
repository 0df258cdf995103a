-- Operations, newest first, or the one with the id $1; $2: how many.
select o.id, o.kind, o.side, o.route, o.filter::text, o.state, o.note, o.canary::bigint, o.goes_on, o.rate::bigint, o.place, o.new_ids, o.skipped,
       o.released, t.outcomes::text, w.pending, o.read_all,
       extract(epoch from clock_timestamp() - o.created_at)::float8,
       extract(epoch from coalesce(o.ended_at, clock_timestamp()) - o.created_at)::float8, o.actor, o.reason, o.planned
  from postroom.operations o
 cross join lateral (
     select coalesce(json_object_agg(t.outcome, t.messages), '{}') as outcomes
       from postroom.operation_tallies t where t.operation = o.id) t
 cross join lateral (select count(*) as pending from postroom.operation_watch w where w.operation = o.id) w
 where $1::uuid is null or o.id = $1
 order by o.created_at desc, o.id limit $2
