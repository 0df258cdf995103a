-- What comparisons of messages with effects found.
create table postroom_reconciliations (
    name        text    not null,
    at_ms       integer not null,
    missing     integer not null, -- messages that consumers lack
    strangers   integer not null, -- messages that consumers have and the outbox has not
    days        integer not null, -- on which business changes and messages differ
    result      text    not null,
    primary key (name, at_ms)
) strict;
