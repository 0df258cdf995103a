-- A commit that wrote nothing waits for no standby. A duplicate writes nothing, and what it repeats may be of a commit whose wait was cut
-- short, which is visible here and not at the standby. A few bytes of log make this transaction's commit wait for all before it.
select pg_catalog.pg_logical_emit_message(true, 'postroom', ''::text)
