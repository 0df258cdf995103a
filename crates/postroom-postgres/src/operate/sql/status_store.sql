-- The row count is the planner's estimate where the table was ever analysed, else a bounded count.
select (select max(number)::bigint from postroom.migrations),
       (select case when c.reltuples >= 100000 then c.reltuples::bigint
                    else (select count(*) from (select from postroom.outbox limit 100000) o) end
          from pg_class c where c.oid = 'postroom.outbox'::regclass)
