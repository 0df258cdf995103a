-- What operators do and see: the audit, sizes, operations on many messages, the archive, and comparisons.

-- What operators did, each in the transaction that did it.
create table if not exists postroom_audit (
    id          bigint       not null auto_increment primary key,
    at          datetime(6)  not null default (utc_timestamp(6)),
    actor       longtext     not null,
    action      varchar(64)  not null,
    reason      longtext     not null check (reason <> ''),
    filter      longtext     not null,
    message_ids longtext     not null,
    key postroom_audit_at (at)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- How large the tables are, hour by hour, so that growth can be told.
create table if not exists postroom_sizes (
    name  varchar(64) not null,
    at    datetime(6) not null,
    `rows` bigint     not null,
    bytes bigint      not null,
    primary key (name, at)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- Operations: something that is done to many messages, step by step, by whichever relay process is there. Each step is one transaction
-- that says in postroom_audit which messages it was about.
create table if not exists postroom_operations (
    id          char(36)     character set ascii collate ascii_bin not null primary key,
    kind        varchar(16)  not null check (kind in ('replay', 'retry', 'discard')),
    side        varchar(8)   not null check (side in ('out', 'in')),
    route       varchar(255) not null, -- for side in: the consumer
    filter      longtext     not null,
    -- Nothing behind this seq: what is written later is not meant.
    upto_seq    bigint       not null,
    planned     bigint,                -- matched when it began
    canary      bigint       check (canary > 0),
    goes_on     tinyint      not null default 0, -- after a canary of which none failed, without being told
    rate        bigint       check (rate > 0),   -- messages a second
    place       varchar(16)  not null default 'before' check (place in ('before', 'behind')),
    new_ids     tinyint      not null default 0,
    state       varchar(16)  not null default 'running' check (state in ('running', 'waiting', 'paused', 'done', 'cancelled')),
    note        longtext,              -- what it waits for
    canary_done tinyint      not null default 0,
    -- Everything up to here was looked at, and whether that was all.
    cursor_seq  bigint       not null default 0,
    read_all    tinyint      not null default 0,
    released    bigint       not null default 0,
    skipped     bigint       not null default 0, -- matched, but is not finished, or is dead
    actor       longtext     not null,
    reason      longtext     not null,
    created_at  datetime(6)  not null,
    stepped_at  datetime(6)  not null,
    ended_at    datetime(6),
    key postroom_operations_open (ended_at, created_at)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- What was given to a relay or consumer and has no outcome yet.
create table if not exists postroom_operation_watch (
    operation  char(36)    character set ascii collate ascii_bin not null,
    seq        bigint      not null,
    message_id char(36)    character set ascii collate ascii_bin not null,
    cause      varchar(16), -- it became a dead letter meanwhile
    primary key (operation, seq, message_id),
    key postroom_operation_watch_message (message_id)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- Note on what is watched that it became a dead letter: whoever removes the letter later does not make it published or handled.
create trigger if not exists postroom_note_death after insert on postroom_dead_letters for each row
    update postroom_operation_watch w join postroom_operations o on o.id = w.operation and o.side = 'out' and o.route = new.route
       set w.cause = new.cause
     where w.message_id = new.id and w.seq = new.seq
----
create trigger if not exists postroom_note_death_in after insert on postroom_dead_consume for each row
    update postroom_operation_watch w join postroom_operations o on o.id = w.operation and o.side = 'in' and o.route = new.consumer
       set w.cause = new.cause
     where w.message_id = new.id
----
-- The outcomes of what was given: published or handled, dead by cause, or removed by an operator.
create table if not exists postroom_operation_tallies (
    operation char(36)    character set ascii collate ascii_bin not null,
    outcome   varchar(16) not null,
    messages  bigint      not null,
    primary key (operation, outcome)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- What people say about groups of dead letters.
create table if not exists postroom_dead_notes (
    number     bigint       not null auto_increment primary key,
    dead_group varchar(128) not null,
    at         datetime(6)  not null,
    actor      longtext     not null,
    note       longtext     not null,
    key postroom_dead_notes_group (dead_group, at)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- Messages may leave the outbox for an archive before they are removed. What leaves is first written down here as a segment: whoever
-- dies in between leaves something that the next process finishes in the same way, so that nothing is lost and nothing archived twice.
create table if not exists postroom_archive_segments (
    id          char(36)    character set ascii collate ascii_bin not null primary key,
    is_stored   tinyint     not null default 0, -- the archive has them, read back
    begun_at    datetime(6) not null,
    taken_until datetime(6) not null            -- a process is at it
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- The messages of segments that are still in the outbox.
create table if not exists postroom_archive_leaving (
    segment char(36) character set ascii collate ascii_bin not null,
    seq     bigint   not null,
    id      char(36) character set ascii collate ascii_bin not null,
    primary key (seq, id),
    key postroom_archive_leaving_segment (segment, seq)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- Messages that came back from an archive: it has them already. They stay until this time, and until every route is done with them. They have
-- place 0 in the outbox, which every route has passed.
create table if not exists postroom_archive_restored (
    seq         bigint      not null,
    id          char(36)    character set ascii collate ascii_bin not null,
    stays_until datetime(6) not null,
    primary key (seq, id),
    key postroom_archive_restored_until (stays_until)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- What comparisons of messages with effects found.
create table if not exists postroom_reconciliations (
    name      varchar(200) not null,
    at        datetime(6)  not null,
    missing   bigint       not null, -- messages that consumers lack
    strangers bigint       not null, -- messages that consumers have and the outbox has not
    days      bigint       not null, -- on which business changes and messages differ
    result    longtext     not null,
    primary key (name, at)
) engine = InnoDB default character set utf8mb4 collate {collation}
