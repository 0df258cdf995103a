-- Grants that the current role lacks, of those that are needed. $1 privileges, $2 kinds of objects, $3 names; parallel arrays.
-- Without the right to use the schema nothing in it can be looked at, and everything is lacking.
select format('grant %s on %s%s to %I', n.privilege || case when n.kind like 'columns(%' then ' ' || substr(n.kind, 8) else '' end,
              case when n.kind = 'table' or n.kind like 'columns(%' then '' else n.kind || ' ' end, n.name, current_user)
  from unnest($1::text[], $2::text[], $3::text[]) with ordinality as n (privilege, kind, name, place)
 where not coalesce(case
           when not has_schema_privilege('postroom', 'usage') then false
           when n.kind = 'schema' then has_schema_privilege(n.name, n.privilege)
           when n.kind = 'function' then has_function_privilege(to_regprocedure(n.name), n.privilege)
           when n.kind like 'columns(%' then has_any_column_privilege(to_regclass(n.name), n.privilege)
           when n.kind = 'sequence' then has_sequence_privilege(to_regclass(n.name), n.privilege)
           else has_table_privilege(to_regclass(n.name), n.privilege) end, true)
 order by n.place
