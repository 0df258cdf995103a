-- Rows of tables that already exist are taken into the outbox. What must be known of a row that its own table has no room for is written here.

-- Whoever has locked the row takes: one process at a time, so that rows enter the outbox in their order.
create table postroom_intakes (
    name nvarchar(255) collate {text} not null constraint postroom_intakes_pk primary key
)
----
create table postroom_intake_rows (
    place   bigint        identity not null constraint postroom_intake_rows_pk primary key,
    intake  nvarchar(255) collate {text} not null,
    row_key nvarchar(512) collate {text} not null, -- what identifies the row, as text
    id      uniqueidentifier, -- of its message, and its seq
    seq     bigint,
    -- taken: its message is in the outbox; dead: and has died; discarded: and an operator discarded it; refused: no message can be made of
    -- the row; unclear: whether its message was sent is not known; unmarked: it was sent, and the row refuses to be marked.
    state   nvarchar(16)  not null check (state in ('taken', 'dead', 'discarded', 'refused', 'unclear', 'unmarked')),
    error   nvarchar(max) collate {text},
    at      datetime2(6)  not null default sysutcdatetime(),
    constraint postroom_intake_rows_row unique (intake, row_key)
)
----
create index postroom_intake_rows_state on postroom_intake_rows (intake, state, place)
----
alter table postroom_intake_rows set (lock_escalation = disable)
