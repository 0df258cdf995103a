-- Who holds locks on tables of postroom, the oldest transaction first. Not what they do: a statement may hold payloads.
select format('process %s (role %s, %s%s) has held locks on %s for %s s', a.pid, a.usename, coalesce(nullif(a.application_name, ''), 'no name'),
              case when a.state is null then '' else ', ' || a.state end, h.tables,
              coalesce(round(extract(epoch from clock_timestamp() - a.xact_start)), 0))
  from (select l.pid, string_agg(distinct l.relation::regclass::text, ', ') as tables
          from pg_locks l join pg_class c on c.oid = l.relation and c.relnamespace = 'postroom'::regnamespace and c.relkind in ('r', 'S')
         where l.granted and l.pid <> pg_backend_pid() and l.database = (select oid from pg_database where datname = current_database())
           and l.mode <> 'AccessShareLock'
         group by l.pid) h
  join pg_stat_activity a on a.pid = h.pid
 order by a.xact_start nulls last limit 3
