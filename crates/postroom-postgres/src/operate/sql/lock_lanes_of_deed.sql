-- Keeps relays from recording anything about these lanes while an operator acts; their renewals wait for that moment too.
-- $1 routes, $2 lanes; parallel arrays.
select from postroom.lanes l
 where (l.route, l.lane) in (select * from unnest($1::text[], $2::smallint[]))
 order by l.route, l.lane for update of l
