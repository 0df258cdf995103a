-- The indexes of a table: name, columns by which it is ordered, columns that it includes, condition, and its name as a statement needs it. $1 schema, $2 table.
select i.relname::text,
       array(select a.attname::text
               from unnest(x.indkey::int2[]) with ordinality k (attnum, n)
               join pg_catalog.pg_attribute a on a.attrelid = x.indrelid and a.attnum = k.attnum
              where k.n <= x.indnkeyatts order by k.n),
       array(select a.attname::text
               from unnest(x.indkey::int2[]) with ordinality k (attnum, n)
               join pg_catalog.pg_attribute a on a.attrelid = x.indrelid and a.attnum = k.attnum
              where k.n > x.indnkeyatts order by k.n),
       pg_catalog.pg_get_expr(x.indpred, x.indrelid),
       case n.nspname when 'public' then '' else pg_catalog.quote_ident(n.nspname) || '.' end || pg_catalog.quote_ident(i.relname)
  from pg_catalog.pg_index x
  join pg_catalog.pg_class i on i.oid = x.indexrelid
  join pg_catalog.pg_class c on c.oid = x.indrelid
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where n.nspname = $1 and c.relname = $2 and x.indisvalid
 order by 1
