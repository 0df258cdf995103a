-- No function looks for a name anywhere but in pg_catalog, unless the name says where: whoever may create functions or operators in
-- a schema on a caller's search_path could otherwise run code as that caller. And nobody executes anything here who was not
-- granted it.
do $$
declare
    each regprocedure;
begin
    for each in
        select p.oid::regprocedure from pg_proc p
         where p.pronamespace = 'postroom'::regnamespace and p.prokind in ('f', 'p')
           and not coalesce(p.proconfig @> array['search_path=pg_catalog, pg_temp'], false)
    loop
        execute format('alter routine %s set search_path = pg_catalog, pg_temp', each);
    end loop;
end
$$;
revoke execute on all functions in schema postroom from public;
