-- How large the tables are, hour by hour, so that growth can be told.

create table postroom.sizes (
    name  text        not null,
    at    timestamptz not null default clock_timestamp(),
    rows  bigint      not null,
    bytes bigint      not null,
    primary key (name, at)
);

-- Remembers the sizes of now, unless that was done within the last 55 minutes, and forgets those of more than 40 days ago. Rows are what
-- the statistics say.
create function postroom.note_sizes() returns void
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if exists (select from postroom.sizes z where z.at > clock_timestamp() - interval '55 minutes')
       -- Another process is at it.
       or not pg_try_advisory_xact_lock(8100113390523507568) then
        return;
    end if;
    insert into postroom.sizes (name, rows, bytes)
    select c.relname, coalesce(s.n_live_tup, 0), pg_total_relation_size(c.oid)
      from pg_class c left join pg_stat_all_tables s on s.relid = c.oid
     where c.relnamespace = 'postroom'::regnamespace and c.relkind = 'r';
    delete from postroom.sizes z where z.at < clock_timestamp() - interval '40 days';
end
$$;
revoke execute on function postroom.note_sizes() from public;
