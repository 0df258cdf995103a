-- Rights on MariaDB and MySQL, for the database `shop`: run as an administrator after each `postroom migrate`, with your database's name in its place.
-- Then give each user its role, and make it the default one:
--   MariaDB: grant postroom_writer to shop_app; set default role postroom_writer for shop_app;
--   MySQL:   grant postroom_writer to shop_app; set default role postroom_writer to shop_app;

-- Applications that write messages: none of the columns seq, place, lane and bytes.
create role if not exists postroom_writer;
grant insert (id, topic, type, payload, `key`, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id, aggregate_version,
              occurred_at, visible_at) on shop.postroom_outbox to postroom_writer;
grant execute on procedure shop.postroom_enqueue to postroom_writer;

-- Consumers: the inbox, and what waits in it.
create role if not exists postroom_consumer;
grant select on shop.postroom_settings to postroom_consumer;
grant select on shop.postroom_migrations to postroom_consumer;
grant select, insert on shop.postroom_inbox to postroom_consumer;
grant select, insert, update, delete on shop.postroom_inbox_messages to postroom_consumer;
grant select, insert, update on shop.postroom_dead_consume to postroom_consumer;
grant select, insert, update on shop.postroom_inbox_versions to postroom_consumer;
grant select, insert, update on shop.postroom_inbox_fillers to postroom_consumer;
grant select, insert, update on shop.postroom_inbox_tenures to postroom_consumer;
grant select, insert, update on shop.postroom_inbox_clocks to postroom_consumer;

-- `postroom run`, with retention, archive, operations and comparisons; and whoever uses the commands that change something.
create role if not exists postroom_relay;
grant select, update on shop.postroom_settings to postroom_relay;
grant select on shop.postroom_migrations to postroom_relay;
grant select, insert, update, delete on shop.postroom_outbox to postroom_relay;
grant select, update on shop.postroom_places to postroom_relay;
grant select, insert, update, delete on shop.postroom_routes to postroom_relay;
grant select, insert, update, delete on shop.postroom_route_revisions to postroom_relay;
grant select, insert, update, delete on shop.postroom_lanes to postroom_relay;
grant select, insert, update, delete on shop.postroom_relays to postroom_relay;
grant select, insert, update, delete on shop.postroom_parked to postroom_relay;
grant select, insert, update, delete on shop.postroom_dead_letters to postroom_relay;
grant select, insert, update, delete on shop.postroom_blocked_keys to postroom_relay;
grant select, insert, update, delete on shop.postroom_inbox to postroom_relay;
grant select, insert, update, delete on shop.postroom_inbox_messages to postroom_relay;
grant select, insert, update, delete on shop.postroom_dead_consume to postroom_relay;
grant select, insert, update on shop.postroom_inbox_versions to postroom_relay;
grant select, insert, update on shop.postroom_inbox_fillers to postroom_relay;
grant select, insert, update on shop.postroom_inbox_tenures to postroom_relay;
grant select, insert, update on shop.postroom_inbox_clocks to postroom_relay;
grant select, insert, update, delete on shop.postroom_audit to postroom_relay;
grant select, insert, update, delete on shop.postroom_sizes to postroom_relay;
grant select, insert, update, delete on shop.postroom_operations to postroom_relay;
grant select, insert, update, delete on shop.postroom_operation_watch to postroom_relay;
grant select, insert, update, delete on shop.postroom_operation_tallies to postroom_relay;
grant select, insert, update, delete on shop.postroom_dead_notes to postroom_relay;
grant select, insert, update, delete on shop.postroom_archive_segments to postroom_relay;
grant select, insert, update, delete on shop.postroom_archive_leaving to postroom_relay;
grant select, insert, update, delete on shop.postroom_archive_restored to postroom_relay;
grant select, insert, update, delete on shop.postroom_reconciliations to postroom_relay;
-- For [[intake]], which also needs select, update and delete on the table whose rows are taken.
grant select, insert, update, delete on shop.postroom_intakes to postroom_relay;
grant select, insert, update, delete on shop.postroom_intake_rows to postroom_relay;
