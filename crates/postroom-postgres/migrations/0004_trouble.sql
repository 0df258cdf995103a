-- Keys that nothing more is sent of until an operator decides: because a message of theirs is dead (its seq), or because an
-- operator parked them (seq 0).
create table postroom.blocked_keys (
    route        text        not null,
    ordering_key text        not null,
    seq          bigint      not null,
    lane         smallint    not null,
    blocked_at   timestamptz not null default clock_timestamp(),
    reason       text        not null,
    primary key (route, ordering_key, seq)
);

-- The last failures of a message, oldest first: [{"at": ..., "attempt": ..., "error": ...}, ...].
alter table postroom.parked       add column history jsonb not null default '[]';
alter table postroom.dead_letters add column history jsonb not null default '[]';

create function postroom.failure_noted(history jsonb, attempt integer, error text) returns jsonb
language sql volatile
as $$
    select case when jsonb_array_length(history) >= 32 then history - 0 else history end
           || jsonb_build_array(jsonb_build_object('at', clock_timestamp(), 'attempt', attempt, 'error', error))
$$;

-- Relays in a row that died holding a lane.
alter table postroom.lanes add column deaths integer not null default 0;

-- Messages that were the only one that their relay had in flight: whether it is so now, and how many relays died over each.
create table postroom.suspects (
    route  text     not null,
    lane   smallint not null,
    seq    bigint   not null,
    alone  boolean  not null,
    deaths integer  not null default 0,
    primary key (route, lane, seq)
);

-- What a relay says about itself with each renewal.
alter table postroom.relays
    add column sink_down_since timestamptz,
    add column sink_error      text;

alter table postroom.audit drop constraint audit_action_check;
alter table postroom.audit add constraint audit_action_check
    check (action in ('dead.retry', 'dead.discard', 'key.park', 'key.unpark', 'key.skip'));
