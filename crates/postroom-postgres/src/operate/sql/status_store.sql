-- The row count is the planner's estimate where the table was ever analysed, else a bounded count; the last column says that it was cut.
select (select max(number)::bigint from postroom.migrations), o.rows, o.rows >= 100000 and c.reltuples < 100000
  from pg_class c
 cross join lateral (
     select case when c.reltuples >= 100000 then c.reltuples::bigint
                 else (select count(*) from (select from postroom.outbox limit 100000) o) end as rows) o
 where c.oid = 'postroom.outbox'::regclass
