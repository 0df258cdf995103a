-- $1 route, $2 topic patterns, as they were last configured.
insert into postroom.routes (name, topics) values ($1, $2) on conflict (name) do update set topics = excluded.topics
