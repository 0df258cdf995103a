-- What comparisons of messages with effects found; and who looked at payloads.
alter table postroom.audit drop constraint audit_action_check;
alter table postroom.audit add constraint audit_action_check check (action in
    ('dead.retry', 'dead.discard', 'dead.expire', 'dead.note', 'key.park', 'key.unpark', 'key.skip', 'inbox.retry', 'inbox.discard',
     'inbox.expire', 'inbox.prune', 'audit.expire', 'route.set', 'route.forget', 'replay', 'operation.begin', 'operation.pause',
     'operation.resume', 'operation.cancel', 'archive.restore', 'payload.read'));
create table postroom.reconciliations (
    name        text        not null check (octet_length(name) between 1 and 255),
    at          timestamptz not null default clock_timestamp(),
    missing     bigint      not null, -- messages that consumers lack
    strangers   bigint      not null, -- messages that consumers have and the outbox has not
    days        bigint      not null, -- on which business changes and messages differ
    result      jsonb       not null,
    primary key (name, at)
);

-- Keeps a result, and of each comparison the newest 100.
create function postroom.note_reconciled(name text, missing bigint, strangers bigint, days bigint, result jsonb) returns void
language sql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
    insert into postroom.reconciliations (name, missing, strangers, days, result)
    values (note_reconciled.name, note_reconciled.missing, note_reconciled.strangers, note_reconciled.days, note_reconciled.result);
    delete from postroom.reconciliations r
     where r.name = note_reconciled.name
       and r.at < (select k.at from postroom.reconciliations k where k.name = note_reconciled.name order by k.at desc offset 99 limit 1);
$$;
revoke execute on function postroom.note_reconciled(text, bigint, bigint, bigint, jsonb) from public;
