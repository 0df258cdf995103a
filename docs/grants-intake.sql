-- What a relay needs besides grants-relay.sql, which takes rows of tables that already exist ([[intake]]). It also needs select, update
-- and delete on those tables; `postroom check` says which right is missing.
grant insert on postroom.outbox to postroom_relay;
grant select on postroom.dead_letters to postroom_relay;
grant select (id, at, actor, action, reason, message_ids) on postroom.audit to postroom_relay;
grant select, insert, update, delete on postroom.intakes, postroom.intake_rows to postroom_relay;
