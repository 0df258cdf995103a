-- Dead letters of consumption by filter, oldest first. $1 consumer, $2 id, $3 topic, $4 type, $5 tenant, $6 aggregate, $7 part of the error,
-- $8 newer than and $9 older than so many seconds; null: any. $10 limit.
-- $11, $12 consumer and seq behind which it goes on; null: from the first.
select d.consumer, d.seq, d.message_id, d.topic, d.type, coalesce(d.key, d.aggregate_id) as key, d.tenant_id, d.aggregate_id,
       d.attempts::bigint, d.cause, d.error, extract(epoch from clock_timestamp() - d.died_at)::float8,
       octet_length(d.payload)::bigint, d.headers::text, d.history::text, 0::smallint
  from postroom.dead_consume d
 where ($1::text is null or d.consumer = $1)
   and ($2::uuid is null or d.message_id = $2)
   and ($3::text is null or d.topic = $3)
   and ($4::text is null or d.type = $4)
   and ($5::text is null or d.tenant_id = $5)
   and ($6::text is null or d.aggregate_id = $6)
   and ($7::text is null or strpos(d.error, $7) > 0)
   and ($8::float8 is null or d.died_at >= clock_timestamp() - $8 * interval '1 second')
   and ($9::float8 is null or d.died_at <= clock_timestamp() - $9 * interval '1 second')
   and ($11::text is null or (d.consumer, d.seq) > ($11, $12::bigint))
 order by d.consumer, d.seq
 limit $10
