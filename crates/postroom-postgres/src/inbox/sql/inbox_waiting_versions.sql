-- Versions of an aggregate that wait, and whether they wait for nothing but their predecessor. $1 consumer, $2 type, $3 id,
-- $4 above this version, $5 below this one.
select aggregate_version as version, state in ('early', 'aside') as early
  from postroom.inbox_messages
 where consumer = $1 and aggregate_type = $2 and aggregate_id = $3 and aggregate_version > $4 and aggregate_version < $5
   and state <> 'done'
 order by aggregate_version
