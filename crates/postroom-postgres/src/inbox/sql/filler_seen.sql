-- Who fills an inbox. $1 consumer.
select owner, epoch, lease_ms, (extract(epoch from expires_at) * 1000000::numeric)::bigint as renewal,
       owner is null or expires_at <= clock_timestamp() as free
  from postroom.inbox_fillers where consumer = $1
