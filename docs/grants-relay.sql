-- What a relay needs: it reads the outbox and writes progress, and sees no table of the application.
grant usage on schema postroom to postroom_relay;
grant execute on all functions in schema postroom to postroom_relay;
grant select on postroom.outbox, postroom.settings, postroom.migrations, postroom.outbox_seq_seq to postroom_relay;
grant select, insert, update on postroom.routes, postroom.route_revisions, postroom.lanes to postroom_relay;
grant select, insert, update, delete on postroom.parked, postroom.relays, postroom.suspects to postroom_relay;
grant select, insert on postroom.dead_letters, postroom.blocked_keys to postroom_relay;
