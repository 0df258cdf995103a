-- What operators did, each in the transaction that did it.
create table postroom.audit (
    id          bigint      primary key generated always as identity,
    at          timestamptz not null default clock_timestamp(),
    actor       text        not null,
    action      text        not null check (action in ('dead.retry', 'dead.discard')),
    reason      text        not null check (reason <> ''),
    filter      jsonb       not null,
    message_ids uuid[]      not null
);
