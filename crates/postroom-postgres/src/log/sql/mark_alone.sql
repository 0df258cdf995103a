-- Notes which message is about to be the only one with the sink, and returns how many relays died over it, and may have.
-- $1 route, $2 lane, $3 epoch, $4 owner, $5 seq, $6 whether the sink was seen to work.
with ours as (
    select l.lane from postroom.lanes l
     where l.route = $1 and l.owner = $4
       and exists (select from postroom.lanes t where t.route = $1 and t.lane = $2 and t.epoch = $3 and t.owner = $4)
),
others as (
    update postroom.suspects s set alone = false
      from ours where s.route = $1 and s.lane = ours.lane and s.alone and (s.lane, s.seq) <> ($2, $5)
)
insert into postroom.suspects as s (route, lane, seq, alone, proven)
select $1, $2, $5, true, $6 from ours where ours.lane = $2
    on conflict (route, lane, seq) do update set alone = true, proven = excluded.proven
returning s.deaths, s.doubts
