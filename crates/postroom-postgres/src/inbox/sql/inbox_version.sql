-- The version of an aggregate that was handled last, locked. $1 consumer, $2 type, $3 id.
select version from postroom.inbox_versions where consumer = $1 and aggregate_type = $2 and aggregate_id = $3 for update
