-- Lanes of a route that has never run: from the oldest message kept. $1 route.
insert into postroom.lanes (route, lane)
select $1, n from postroom.settings s, generate_series(0, s.lanes - 1) n
    on conflict (route, lane) do nothing
