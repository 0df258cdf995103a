-- The messages of a segment, lane by lane in the order of their seqs. $1 segment. A time that a calendar cannot say is the nearest one
-- that it can.
select o.seq, o.id, o.topic, o.type, o.payload, o.key, o.routing_key, o.content_type, o.headers::text as headers, o.tenant_id,
       o.aggregate_type, o.aggregate_id, o.aggregate_version,
       (extract(epoch from greatest(timestamptz '0001-01-01 00:00:00+00', least(o.occurred_at, timestamptz '9999-12-31 00:00:00+00'))) * 1000000)::bigint
           as occurred_us
  from postroom.archive_segments g
 cross join lateral unnest(g.lanes, g.seqs, g.ids) w (lane, seq, id)
  join postroom.outbox o on o.lane = w.lane and o.seq = w.seq and o.id = w.id
 where g.id = $1
 order by o.lane, o.seq
