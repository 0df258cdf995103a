-- Notes the version that was handled, and lets the next one go. $1 consumer, $2 type, $3 id, $4 version.
with noted as (
    update postroom.inbox_versions set version = $4 where consumer = $1 and aggregate_type = $2 and aggregate_id = $3
)
update postroom.inbox_messages set state = 'new', due_at = clock_timestamp()
 where consumer = $1 and aggregate_type = $2 and aggregate_id = $3 and aggregate_version = case when $4 < 9223372036854775807 then $4 + 1 end
   and state in ('early', 'aside')
