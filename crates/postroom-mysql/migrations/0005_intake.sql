-- Rows of tables that already exist are taken into the outbox. What must be known of a row that its own table has no room for stands here.

-- Whoever has locked the row takes: one process at a time, so that rows enter the outbox in their order.
create table if not exists postroom_intakes (
    name varchar(255) not null primary key
) engine = InnoDB default character set utf8mb4 collate {collation}
----
create table if not exists postroom_intake_rows (
    intake  varchar(255) not null,
    row_key varchar(500) not null, -- what identifies the row, as text
    place   bigint       not null auto_increment,
    id      char(36)     character set ascii collate ascii_bin, -- of its message, and its seq
    seq     bigint,
    -- taken: its message is in the outbox; dead: and has died; discarded: and an operator discarded it; refused: no message can be made of
    -- the row; unclear: whether its message was sent is not known; unmarked: it was sent, and the row refuses to be marked.
    state   varchar(16)  not null check (state in ('taken', 'dead', 'discarded', 'refused', 'unclear', 'unmarked')),
    error   longtext,
    at      datetime(6)  not null default (utc_timestamp(6)),
    primary key (intake, row_key),
    unique key postroom_intake_rows_place (place),
    key postroom_intake_rows_state (intake, state, place)
) engine = InnoDB default character set utf8mb4 collate {collation}
