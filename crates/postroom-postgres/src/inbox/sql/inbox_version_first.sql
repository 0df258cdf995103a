-- Makes the row of an aggregate, so that it can be locked. $1 consumer, $2 type, $3 id.
insert into postroom.inbox_versions (consumer, aggregate_type, aggregate_id) values ($1, $2, $3) on conflict do nothing
