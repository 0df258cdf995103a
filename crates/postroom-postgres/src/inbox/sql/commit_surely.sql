-- Before the commit of what the broker is then told to forget: it must outlive a crash and a failover when it says so.
--
-- Deferred constraints and triggers run first, while the caller's statement_timeout holds for them.
set constraints all immediate;
-- A commit with synchronous_commit = off need not outlive a crash; and a statement_timeout that ends a commit's wait for its standby
-- makes PostgreSQL report success (a warning, "canceling wait for synchronous replication").
select pg_catalog.set_config('statement_timeout', '0', true),
       case when pg_catalog.current_setting('synchronous_commit') = 'off' then pg_catalog.set_config('synchronous_commit', 'on', true) end
