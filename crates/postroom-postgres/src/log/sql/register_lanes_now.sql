-- Lanes of a route that has never run: from now. What is visible now is consumed; what commits later is not.
-- $1 route, $2 floor, from a checkpoint that committed before this statement.
insert into postroom.lanes (route, lane, position_snapshot, position_seq, floor_seq, start_snapshot, start_seq)
select $1, n, pg_current_snapshot(), q.last_value - (not q.is_called)::int, $2, pg_current_snapshot(),
       q.last_value - (not q.is_called)::int
  from postroom.settings s, generate_series(0, s.lanes - 1) n, postroom.outbox_seq_seq q
    on conflict (route, lane) do nothing
