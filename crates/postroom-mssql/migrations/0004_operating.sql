-- What operators do and see: the audit, sizes, operations on many messages, the archive, and comparisons.

-- What operators did, each in the transaction that did it.
create table postroom_audit (
    id          bigint        identity not null constraint postroom_audit_pk primary key,
    at          datetime2(6)  not null default sysutcdatetime(),
    actor       nvarchar(max) collate {text} not null,
    action      nvarchar(64)  not null,
    reason      nvarchar(max) collate {text} not null check (reason <> ''),
    filter      nvarchar(max) collate {text} not null,
    message_ids nvarchar(max) collate {text} not null
)
----
create index postroom_audit_at on postroom_audit (at)
----
-- What is old is found by its time; and much at once must not lock everybody out.
create index postroom_dead_letters_died on postroom_dead_letters (died_at)
----
create index postroom_dead_consume_died on postroom_dead_consume (died_at)
----
alter table postroom_dead_letters set (lock_escalation = disable)
----
alter table postroom_dead_consume set (lock_escalation = disable)
----
alter table postroom_blocked_keys set (lock_escalation = disable)
----
-- How large the tables are, hour by hour, so that growth can be told.
create table postroom_sizes (
    name      nvarchar(64) not null,
    at        datetime2(6) not null,
    row_count bigint       not null,
    bytes     bigint       not null,
    constraint postroom_sizes_pk primary key (name, at)
)
----
-- Operations: something that is done to many messages, step by step, by whichever relay process is there. Each step is one transaction
-- that says in postroom_audit which messages it was about.
create table postroom_operations (
    id          uniqueidentifier not null constraint postroom_operations_pk primary key,
    kind        nvarchar(16)  not null check (kind in ('replay', 'retry', 'discard')),
    side        nvarchar(16)  not null check (side in ('out', 'in')),
    route       nvarchar(255) collate {text} not null, -- for side in: the consumer
    filter      nvarchar(max) collate {text} not null,
    -- Nothing behind this seq: what is written later is not meant.
    upto_seq    bigint        not null,
    planned     bigint,                 -- matched when it began
    canary      bigint        check (canary > 0),
    goes_on     tinyint       not null default 0, -- after a canary of which none failed, without being told
    rate        bigint        check (rate > 0),   -- messages a second
    place       nvarchar(16)  not null default 'before' check (place in ('before', 'behind')),
    new_ids     tinyint       not null default 0,
    state       nvarchar(16)  not null default 'running' check (state in ('running', 'waiting', 'paused', 'done', 'cancelled')),
    note        nvarchar(max) collate {text}, -- what it waits for
    canary_done tinyint       not null default 0,
    -- Everything up to here was looked at, and whether that was all.
    cursor_seq  bigint        not null default 0,
    read_all    tinyint       not null default 0,
    released    bigint        not null default 0,
    skipped     bigint        not null default 0, -- matched, but is not finished, or is dead
    actor       nvarchar(max) collate {text} not null,
    reason      nvarchar(max) collate {text} not null,
    created_at  datetime2(6)  not null,
    stepped_at  datetime2(6)  not null,
    ended_at    datetime2(6)
)
----
create index postroom_operations_open on postroom_operations (ended_at, created_at)
----
-- What was given to a relay or consumer and has no outcome yet. Whoever records a death notes its cause here: whoever removes the letter later does
-- not make it published or handled.
create table postroom_operation_watch (
    operation  uniqueidentifier not null,
    seq        bigint           not null,
    message_id uniqueidentifier not null,
    cause      nvarchar(16), -- it became a dead letter meanwhile
    constraint postroom_operation_watch_pk primary key (operation, seq, message_id)
)
----
create index postroom_operation_watch_message on postroom_operation_watch (message_id)
----
alter table postroom_operation_watch set (lock_escalation = disable)
----
-- The outcomes of what was given: published or handled, dead by cause, or removed by an operator.
create table postroom_operation_tallies (
    operation uniqueidentifier not null,
    outcome   nvarchar(16)     not null,
    messages  bigint           not null,
    constraint postroom_operation_tallies_pk primary key (operation, outcome)
)
----
-- What people say about groups of dead letters.
create table postroom_dead_notes (
    number     bigint        identity not null constraint postroom_dead_notes_pk primary key,
    dead_group nvarchar(200) collate {text} not null,
    at         datetime2(6)  not null,
    actor      nvarchar(max) collate {text} not null,
    note       nvarchar(max) collate {text} not null
)
----
create index postroom_dead_notes_group on postroom_dead_notes (dead_group, at)
----
-- Messages may leave the outbox for an archive before they are removed. What leaves is first written down here as a segment: whoever
-- dies in between leaves something that the next process finishes in the same way, so that nothing is lost and nothing archived twice.
create table postroom_archive_segments (
    id          uniqueidentifier not null constraint postroom_archive_segments_pk primary key,
    is_stored   tinyint      not null default 0, -- the archive has them, read back
    begun_at    datetime2(6) not null,
    taken_until datetime2(6) not null            -- a process is at it
)
----
-- The messages of segments that are still in the outbox.
create table postroom_archive_leaving (
    segment uniqueidentifier not null,
    seq     bigint           not null,
    id      uniqueidentifier not null,
    constraint postroom_archive_leaving_pk primary key (seq, id)
)
----
create index postroom_archive_leaving_segment on postroom_archive_leaving (segment, seq)
----
-- Messages that came back from an archive: it has them already. They stay until this time, and until every route is done with them. They have
-- place 0 in the outbox, which every route has passed.
create table postroom_archive_restored (
    seq         bigint           not null,
    id          uniqueidentifier not null,
    stays_until datetime2(6)     not null,
    constraint postroom_archive_restored_pk primary key (seq, id)
)
----
create index postroom_archive_restored_until on postroom_archive_restored (stays_until)
----
-- What comparisons of messages with effects found.
create table postroom_reconciliations (
    name      nvarchar(200) collate {text} not null,
    at        datetime2(6)  not null,
    missing   bigint        not null, -- messages that consumers lack
    strangers bigint        not null, -- messages that consumers have and the outbox has not
    days      bigint        not null, -- on which business changes and messages differ
    result    nvarchar(max) collate {text} not null,
    constraint postroom_reconciliations_pk primary key (name, at)
)
