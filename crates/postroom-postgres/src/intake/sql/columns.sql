-- The columns of a table, in their order. $1 schema, $2 table.
select a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod), t.typname::text, a.attnotnull,
       coalesce(k.indkey[0] = a.attnum and k.indnkeyatts = 1, false) as is_key,
       a.attgenerated::text <> '' as is_generated, c.relkind::text,
       exists (select from pg_catalog.pg_index i
                where i.indrelid = c.oid and i.indisunique and i.indpred is null and i.indnkeyatts = 1 and i.indkey[0] = a.attnum) as is_unique,
       exists (select from pg_catalog.pg_index i where i.indrelid = c.oid and i.indisvalid and i.indkey[0] = a.attnum) as leads_index,
       to_regclass('postroom.intake_rows') is not null as tracked
  from pg_catalog.pg_class c
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
  join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
  join pg_catalog.pg_type t on t.oid = a.atttypid
  left join pg_catalog.pg_index k on k.indrelid = c.oid and k.indisprimary
 where n.nspname = $1 and c.relname = $2 and c.relkind in ('r', 'p', 'v', 'f', 'm')
 order by a.attnum
