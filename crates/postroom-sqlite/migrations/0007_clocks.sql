-- The clock that the last take of each consumer saw, noted once a second: one that went back shows by it.
create table postroom_inbox_clocks (
    consumer text    primary key,
    at_ms    integer not null
) without rowid;
