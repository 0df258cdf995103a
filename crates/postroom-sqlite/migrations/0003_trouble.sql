-- Keys that nothing more is sent of until an operator decides: because a message of theirs is dead (its seq), or because an
-- operator parked them (seq 0).
create table postroom_blocked_keys (
    route        text    not null,
    ordering_key text    not null,
    seq          integer not null,
    blocked_ms   integer not null default (cast(unixepoch('subsec') * 1000 as integer)),
    reason       text    not null,
    primary key (route, ordering_key, seq)
) without rowid;

-- The last failures of a message, oldest first: [{"at": ..., "attempt": ..., "error": ...}, ...].
alter table postroom_parked       add column history text not null default '[]';
alter table postroom_dead_letters add column history text not null default '[]';

create table postroom_audit_3 (
    id          integer primary key autoincrement,
    at_ms       integer not null default (cast(unixepoch('subsec') * 1000 as integer)),
    actor       text    not null,
    action      text    not null
        check (action in ('dead.retry', 'dead.discard', 'key.park', 'key.unpark', 'key.skip')),
    reason      text    not null check (reason <> ''),
    filter      text    not null,
    message_ids text    not null
);
insert into postroom_audit_3 select * from postroom_audit;
drop table postroom_audit;
alter table postroom_audit_3 rename to postroom_audit;
