-- Sizes of our tables, and what they were about a day ago: the oldest note of the last 25 hours that is at least 50 minutes old. The
-- server knows all of it without reading the tables.
select c.relname::text, coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0), pg_table_size(c.oid), pg_indexes_size(c.oid),
       h.rows, h.bytes, extract(epoch from clock_timestamp() - h.at)::float8, clock_timestamp()
  from pg_class c
  left join pg_stat_all_tables s on s.relid = c.oid
  left join lateral (
      select z.rows, z.bytes, z.at from postroom.sizes z
       where z.name = c.relname and z.at > clock_timestamp() - interval '25 hours'
         and z.at < clock_timestamp() - interval '50 minutes'
       order by z.at limit 1) h on true
 where c.relnamespace = 'postroom'::regnamespace and c.relkind = 'r'
 order by c.relname
