-- Rows of tables that already exist are taken into the outbox. What must be known of a row that its own table has no room for stands here.
create table postroom_intake_rows (
    place   integer primary key autoincrement,
    intake  text    not null,
    row_key text    not null, -- what identifies the row, as text
    id      text,             -- of its message, and its seq
    seq     integer,
    -- taken: its message is in the outbox; dead: and has died; discarded: and an operator discarded it; refused: no message can be made of
    -- the row; unclear: whether its message was sent is not known; unmarked: it was sent, and the row refuses to be marked.
    state   text    not null check (state in ('taken', 'dead', 'discarded', 'refused', 'unclear', 'unmarked')),
    error   text,
    at_ms   integer not null default (cast(unixepoch('subsec') * 1000 as integer)),
    unique (intake, row_key)
) strict;
create index postroom_intake_rows_state on postroom_intake_rows (intake, state, place);
