-- Whether the route has parked messages or blocked keys. $1 route.
select exists (select from postroom.parked where route = $1) or exists (select from postroom.blocked_keys where route = $1)
