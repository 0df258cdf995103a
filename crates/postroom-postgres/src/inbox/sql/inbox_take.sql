-- $1 consumer, $2 at most so many, $3 owner, $4 seconds of the lease, $5 claims that may end without a word.
select claim, claims, attempts, window_over, message_id as id, topic, type, payload, key, routing_key, content_type,
       headers::text as headers, tenant_id, aggregate_type, aggregate_id, aggregate_version, occurred_at,
       (extract(epoch from occurred_at) * 1000000::numeric)::bigint as occurred_us
  from postroom.inbox_take($1, $2, $3, $4::float8 * interval '1 second', $5)
