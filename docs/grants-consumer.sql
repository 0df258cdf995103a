-- What a consumer needs in its own database: to claim messages, to keep those that wait, to note versions, and to see whether the schema
-- is one that it knows. Consumers of one
-- database see each other's messages: they trust each other, or have a database each.
grant usage on schema postroom to app_consumer;
grant execute on function
    postroom.inbox_admit(text, uuid),
    postroom.inbox_admit_many(text, uuid[]),
    postroom.inbox_newer(text, text, text, bigint),
    postroom.inbox_take(text, integer, text, interval, integer),
    postroom.inbox_done(text, uuid, bigint),
    postroom.inbox_renew(text, text, interval),
    postroom.inbox_fail(text, uuid, bigint, text, interval, integer, boolean),
    postroom.inbox_bury(text, uuid, integer, text, text),
    postroom.failure_noted(jsonb, integer, text) to app_consumer;
grant select, insert on postroom.inbox, postroom.dead_consume to app_consumer;
grant select, insert, update, delete on postroom.inbox_messages, postroom.inbox_versions, postroom.inbox_clocks to app_consumer;
grant usage on sequence postroom.inbox_claims to app_consumer;
grant select, insert, update on postroom.inbox_fillers to app_consumer;
grant select on postroom.migrations, postroom.settings to app_consumer;
