-- Blocks keys over their dead letters. $1 route, $2 seqs, $3 lanes, $4 keys, $5 reasons; parallel arrays.
insert into postroom.blocked_keys (route, seq, lane, ordering_key, reason)
select $1, p.seq, p.lane, p.key, p.reason
  from unnest($2::bigint[], $3::smallint[], $4::text[], $5::text[]) as p (seq, lane, key, reason)
    on conflict (route, ordering_key, seq) do nothing
