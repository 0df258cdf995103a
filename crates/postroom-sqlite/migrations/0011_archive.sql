-- Messages may leave the outbox for an archive before they are removed. What leaves is first written down here as a segment: whoever
-- dies in between leaves something that the next process finishes in the same way, so that nothing is lost and nothing archived twice.

-- Once a message of this outbox was archived, none is removed without that.
alter table postroom_settings add column archives integer not null default 0;
-- Names this outbox, so that an archive can hold several; and how many segments were ended.
alter table postroom_settings add column outbox_id text not null default '';
alter table postroom_settings add column archived_segments integer not null default 0;
update postroom_settings set outbox_id = lower(hex(randomblob(16)));

create table postroom_archive_segments (
    id             text    primary key,
    stored         integer not null default 0, -- the archive has them, read back
    begun_ms       integer not null,
    taken_until_ms integer not null            -- a process is at it
) strict;

-- The messages of segments that are still in the outbox.
create table postroom_archive_leaving (
    segment text    not null,
    seq     integer not null,
    id      text    not null,
    primary key (seq, id)
) strict, without rowid;
create index postroom_archive_leaving_segment on postroom_archive_leaving (segment, seq);

-- Messages that came back from an archive: it has them already. They stay until this time, and until every route is done with them.
create table postroom_archive_restored (
    seq            integer not null,
    id             text    not null,
    stays_until_ms integer not null,
    primary key (seq, id)
) strict, without rowid;
