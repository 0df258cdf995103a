-- What of the server can lose messages, hold them up, or let the tables grow. One row; what this role may not see is null.
select current_setting('server_version'), current_setting('fsync'), current_setting('full_page_writes'),
       current_setting('synchronous_commit'), current_setting('autovacuum'),
       (select pg_encoding_to_char(d.encoding)::text from pg_database d where d.datname = current_database()),
       (select age(d.datfrozenxid)::bigint from pg_database d where d.datname = current_database()),
       (select s.seqcache from pg_sequence s where s.seqrelid = to_regclass('postroom.outbox_seq_seq')),
       (select max(m.number)::bigint from postroom.migrations m),
       has_schema_privilege('public', 'postroom', 'create'),
       (select r.rolsuper from pg_roles r where r.rolname = current_user),
       pg_has_role(current_user, 'pg_read_all_stats', 'member'),
       (select max(extract(epoch from clock_timestamp() - a.xact_start))::float8 from pg_stat_activity a
         where a.datname = current_database() and a.pid <> pg_backend_pid() and a.backend_type = 'client backend'),
       (select count(*) from pg_prepared_xacts p where p.prepared < clock_timestamp() - interval '10 minutes'),
       (select string_agg(s.slot_name::text, ', ' order by s.slot_name) from pg_replication_slots s where not s.active),
       (select max(pg_wal_lsn_diff(case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end, s.restart_lsn))::bigint
          from pg_replication_slots s where not s.active),
       (select string_agg(c.relname::text, ', ' order by c.relname) from pg_class c
         where c.relnamespace = 'postroom'::regnamespace and c.relkind = 'r' and 'autovacuum_enabled=false' = any (c.reloptions)),
       (select string_agg(c.relname::text, ', ' order by c.relname) from pg_class c join pg_stat_all_tables s on s.relid = c.oid
         where c.relnamespace = 'postroom'::regnamespace and s.n_dead_tup > 100000 and s.n_dead_tup > 2 * s.n_live_tup),
       clock_timestamp(), pg_is_in_recovery()
