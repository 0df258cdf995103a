-- Topics that no route takes, among the newest $1 rows of the outbox over all lanes, at least 50 of each: how many, and since when.
select o.topic, count(*), extract(epoch from clock_timestamp() - min(o.occurred_at))::float8
  from postroom.settings s
 cross join generate_series(0, s.lanes - 1) n
 cross join lateral (select f.topic, f.occurred_at from postroom.outbox f
                      where f.lane = n::smallint order by f.seq desc limit greatest(50, $1::bigint / s.lanes)) o
 where not exists (select from postroom.routes r cross join unnest(r.topics) t
                    where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))
 group by o.topic order by 2 desc, 1 limit 20
