-- What a consumer needs in its own database: to claim messages, to keep those that wait, and to note versions.
grant usage on schema postroom to app_consumer;
grant execute on all functions in schema postroom to app_consumer;
revoke execute on function postroom.mend() from app_consumer;
grant select, insert on postroom.inbox, postroom.dead_consume to app_consumer;
grant select, insert, update, delete on postroom.inbox_messages, postroom.inbox_versions, postroom.inbox_clocks to app_consumer;
grant usage on sequence postroom.inbox_claims to app_consumer;
grant select, insert, update on postroom.inbox_fillers to app_consumer;
