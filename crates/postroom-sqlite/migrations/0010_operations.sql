-- Operations: something that is done to many messages, step by step, by whichever relay process is there. Each step is one transaction
-- that says in postroom_audit which messages it was about.
create table postroom_operations (
    id          text    primary key,
    kind        text    not null check (kind in ('replay', 'retry', 'discard')),
    side        text    not null check (side in ('out', 'in')),
    route       text    not null, -- for side in: the consumer
    filter      text    not null,
    -- Nothing behind this seq: what is written later is not meant.
    upto_seq    integer not null,
    planned     integer,                    -- matched when it began
    canary      integer check (canary > 0),
    goes_on     integer not null default 0, -- after a canary of which none failed, without being told
    rate        integer check (rate > 0),   -- messages a second
    place       text    not null default 'before' check (place in ('before', 'behind')),
    new_ids     integer not null default 0,
    state       text    not null default 'running' check (state in ('running', 'waiting', 'paused', 'done', 'cancelled')),
    note        text,                       -- what it waits for
    canary_done integer not null default 0,
    -- Everything up to here was looked at, and whether that was all.
    cursor_seq  integer not null default 0,
    read_all    integer not null default 0,
    released    integer not null default 0,
    skipped     integer not null default 0, -- matched, but is not finished, or is dead
    actor       text    not null,
    reason      text    not null,
    created_ms  integer not null,
    stepped_ms  integer not null,
    ended_ms    integer
) strict;

-- What was given to a relay or consumer and has no outcome yet.
create table postroom_operation_watch (
    operation  text    not null,
    seq        integer not null,
    message_id text    not null,
    cause      text,   -- it became a dead letter meanwhile
    primary key (operation, seq, message_id)
) strict, without rowid;
create index postroom_operation_watch_message on postroom_operation_watch (message_id);

-- Note on what is watched that it became a dead letter: whoever removes the letter later does not make it published or handled.
create trigger postroom_note_death after insert on postroom_dead_letters
when exists (select 1 from postroom_operation_watch w where w.message_id = new.id)
begin
    update postroom_operation_watch set cause = new.cause
     where message_id = new.id and seq = new.seq
       and operation in (select o.id from postroom_operations o where o.side = 'out' and o.route = new.route);
end;
create trigger postroom_note_death_in after insert on postroom_dead_consume
when exists (select 1 from postroom_operation_watch w where w.message_id = new.id)
begin
    update postroom_operation_watch set cause = new.cause
     where message_id = new.id
       and operation in (select o.id from postroom_operations o where o.side = 'in' and o.route = new.consumer);
end;

-- The outcomes of what was given: published or handled, dead by cause, or removed by an operator.
create table postroom_operation_tallies (
    operation text    not null,
    outcome   text    not null,
    messages  integer not null,
    primary key (operation, outcome)
) strict, without rowid;

-- What people say about groups of dead letters.
create table postroom_dead_notes (
    dead_group text    not null,
    at_ms      integer not null,
    actor      text    not null,
    note       text    not null
) strict;
create index postroom_dead_notes_group on postroom_dead_notes (dead_group, at_ms);
