-- What an operator does to the file is noticed: a restore in place, an outbox that was emptied and counts from one again, other
-- settings of a route.

-- The message at the position, so that another one with its seq is not taken for it. Null: not known.
alter table postroom_lanes add column position_id text;

-- When the wait of a parked message began: a clock that went back shows by it.
alter table postroom_parked add column waits_since_ms integer;

-- A route's settings are the database's. A relay that starts can add topics and make order and on_dead stricter; what makes
-- them looser is an operator's act. Each change is kept: it says why a message was passed by.
alter table postroom_routes add column ordering text check (ordering in ('key', 'pipelined', 'none'));
alter table postroom_routes add column on_dead text check (on_dead in ('skip', 'block'));
alter table postroom_routes add column revision integer not null default 1;
create table postroom_route_revisions (
    route    text    not null,
    revision integer not null,
    topics   text    not null,
    ordering text,
    on_dead  text,
    set_by   text    not null,
    set_ms   integer not null default (cast(unixepoch('subsec') * 1000 as integer)),
    primary key (route, revision)
) without rowid;
insert into postroom_route_revisions (route, revision, topics, set_by)
select name, revision, topics, 'migration 5' from postroom_routes;

create table postroom_audit_5 (
    id          integer primary key autoincrement,
    at_ms       integer not null default (cast(unixepoch('subsec') * 1000 as integer)),
    actor       text    not null,
    action      text    not null,
    reason      text    not null check (reason <> ''),
    filter      text    not null,
    message_ids text    not null
);
insert into postroom_audit_5 select * from postroom_audit;
drop table postroom_audit;
alter table postroom_audit_5 rename to postroom_audit;
