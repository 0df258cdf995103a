-- What operators did, each in the transaction that did it.
create table postroom_audit (
    id          integer primary key autoincrement,
    at_ms       integer not null default (cast(unixepoch('subsec') * 1000 as integer)),
    actor       text    not null,
    action      text    not null check (action in ('dead.retry', 'dead.discard')),
    reason      text    not null check (reason <> ''),
    filter      text    not null,
    message_ids text    not null
);
