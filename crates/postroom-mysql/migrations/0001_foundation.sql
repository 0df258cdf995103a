-- Outbox, routes, lanes, and what waits or is dead. Statements are separated by lines of four hyphens. Each may be repeated: MariaDB and MySQL
-- commit every change of the schema at once. {collation} compares texts byte by byte, with their trailing spaces; {lanes} is the number of lanes.

create table if not exists postroom_settings (
    only_row              tinyint  not null default 1 primary key check (only_row = 1),
    lanes                 smallint not null,
    -- The oldest program that can work with the schema, by the number of the newest migration that it knows.
    oldest_program        int      not null,
    -- Names this outbox, so that an archive can hold several.
    outbox_id             char(36) character set ascii collate ascii_bin not null default (uuid()),
    -- What is forgotten of an inbox is at least so old: a message that comes again later has its effect twice.
    redelivery_horizon_us bigint   not null default 1209600000000 check (redelivery_horizon_us > 0),
    -- Once a message of this outbox was archived, none is removed without that; and how many segments were ended.
    archives              tinyint  not null default 0,
    archived_segments     bigint   not null default 0
) engine = InnoDB default character set utf8mb4 collate {collation}
----
insert ignore into postroom_settings (only_row, lanes, oldest_program) values (1, {lanes}, 1)
----
-- Texts are one character longer than what is let in: a session without a strict sql_mode cuts a text off at the length of its column, and what
-- was cut off is refused like what is too long.
--
-- seq says which transaction of two with the same key was first; it does not say which transaction was committed first, so nobody reads on from a
-- seq. place does: a relay gives it to a row when it sees it, and whoever reads a lane in the order of places passes nothing by.
create table if not exists postroom_outbox (
    seq               bigint       not null auto_increment primary key,
    place             bigint,
    lane              smallint     not null default 0,
    bytes             int          not null default 0,
    id                char(36)     character set ascii collate ascii_bin not null default '',
    topic             varchar(256) not null,
    type              varchar(256) not null,
    payload           longblob     not null,
    `key`             varchar(513),
    routing_key       varchar(256),
    content_type      varchar(256) not null default 'application/octet-stream',
    headers           longtext,
    tenant_id         varchar(513),
    aggregate_type    varchar(256),
    aggregate_id      varchar(513),
    aggregate_version bigint,
    occurred_at       datetime(6)  not null default (utc_timestamp(6)),
    visible_at        datetime(6),
    unique key postroom_outbox_id (id),
    key postroom_outbox_fresh (lane, place),
    constraint postroom_outbox_id_is_a_uuid check (id regexp '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'),
    constraint postroom_outbox_topic_has_1_to_255_bytes check (octet_length(topic) between 1 and 255),
    constraint postroom_outbox_type_has_1_to_255_bytes check (octet_length(type) between 1 and 255),
    constraint postroom_outbox_payload_has_at_most_1048576_bytes check (octet_length(payload) <= 1048576),
    constraint postroom_outbox_key_has_1_to_512_bytes check (octet_length(`key`) between 1 and 512),
    constraint postroom_outbox_routing_key_has_at_most_255_bytes check (octet_length(routing_key) <= 255),
    constraint postroom_outbox_content_type_has_1_to_255_bytes check (octet_length(content_type) between 1 and 255),
    constraint postroom_outbox_headers_are_an_object check (headers is null or (json_valid(headers) and json_type(headers) = 'OBJECT')),
    constraint postroom_outbox_headers_have_at_most_65536_bytes check (octet_length(headers) <= 65536),
    constraint postroom_outbox_tenant_id_has_at_most_512_bytes check (octet_length(tenant_id) <= 512),
    constraint postroom_outbox_aggregate_type_has_at_most_255_bytes check (octet_length(aggregate_type) <= 255),
    constraint postroom_outbox_aggregate_id_has_1_to_512_bytes check (octet_length(aggregate_id) between 1 and 512)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- What a writer leaves out or must not choose. The id is a UUIDv7 (RFC 9562). The checks of the table are made once more, since MariaDB lets any session
-- switch those off (check_constraint_checks): a row that breaks one could not be given its place, and would hold up all others.
create trigger if not exists postroom_outbox_written before insert on postroom_outbox for each row
begin
    declare ms bigint default timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)) div 1000;
    declare r char(20) character set ascii default lower(hex(random_bytes(10)));
    if new.id = '' then
        set new.id = lower(concat(substr(lpad(hex(ms), 12, '0'), 1, 8), '-', substr(lpad(hex(ms), 12, '0'), 9, 4), '-7', substr(r, 1, 3), '-',
                                  hex(8 + (conv(substr(r, 4, 1), 16, 10) & 3)), substr(r, 5, 3), '-', substr(r, 8, 12)));
    else
        set new.id = lower(new.id);
    end if;
    -- The archive puts messages back with theirs.
    if coalesce(new.seq, 0) <> 0 and coalesce(@postroom_restores, 0) <> 1 then
        signal sqlstate '45000' set message_text = 'postroom_outbox: seq is not for writers to choose';
    end if;
    if not (new.id regexp '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
            and octet_length(new.topic) between 1 and 255 and octet_length(new.type) between 1 and 255
            and octet_length(new.payload) <= 1048576
            and coalesce(octet_length(new.`key`) between 1 and 512, true)
            and coalesce(octet_length(new.routing_key) <= 255, true)
            and octet_length(new.content_type) between 1 and 255
            and (new.headers is null or (json_valid(new.headers) and json_type(new.headers) = 'OBJECT' and octet_length(new.headers) <= 65536))
            and coalesce(octet_length(new.tenant_id) <= 512, true) and coalesce(octet_length(new.aggregate_type) <= 255, true)
            and coalesce(octet_length(new.aggregate_id) between 1 and 512, true)) then
        signal sqlstate '45000' set message_text = 'postroom_outbox: a column is too long, empty, not a UUID or not a JSON object; see the checks of the table';
    end if;
    set new.place = null;
    set new.lane = crc32(coalesce(new.`key`, new.aggregate_id, new.id)) % {lanes};
    set new.bytes = octet_length(new.payload) + coalesce(octet_length(new.headers), 0) + 512;
    -- For writers that left it out.
    set @postroom_id = new.id;
end
----
-- The next place of each lane. Whoever gives places locks the row, so that a place is seen after all before it.
create table if not exists postroom_places (
    lane       smallint not null primary key,
    next_place bigint   not null
) engine = InnoDB
----
insert ignore into postroom_places (lane, next_place)
select n.lane, 1 from json_table('{lane_list}', '$[*]' columns (lane smallint path '$')) n
----
create table if not exists postroom_routes (
    name     varchar(200) not null primary key,
    topics   longtext     not null,
    ordering varchar(16)  check (ordering in ('key', 'pipelined', 'none')),
    on_dead  varchar(16)  check (on_dead in ('skip', 'block')),
    revision bigint       not null default 1
) engine = InnoDB default character set utf8mb4 collate {collation}
----
create table if not exists postroom_route_revisions (
    route    varchar(200) not null,
    revision bigint       not null,
    topics   longtext     not null,
    ordering varchar(16),
    on_dead  varchar(16),
    set_by   varchar(512) not null,
    set_at   datetime(6)  not null default (utc_timestamp(6)),
    primary key (route, revision)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
create table if not exists postroom_lanes (
    route      varchar(200) not null,
    lane       smallint     not null,
    owner      varchar(512),
    epoch      bigint       not null default 0,
    expires_at datetime(6),
    position   bigint       not null default 0,
    settled_at datetime(6),
    primary key (route, lane)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
create table if not exists postroom_relays (
    route           varchar(200) not null,
    owner           varchar(512) not null,
    seen_at         datetime(6)  not null,
    expires_at      datetime(6)  not null,
    sink            longtext,
    sink_blocked    tinyint      not null default 0,
    sink_down_since datetime(6),
    sink_error      longtext,
    primary key (route, owner)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
-- Copies of messages that wait: 'retry' from due_at on, 'scheduled' until due_at, 'queued' behind others of their key, without a time.
create table if not exists postroom_parked (
    route             varchar(200) not null,
    seq               bigint       not null,
    lane              smallint     not null,
    ordering_key      varchar(512),
    state             varchar(16)  not null check (state in ('retry', 'scheduled', 'queued')),
    attempts          int          not null default 0,
    due_at            datetime(6),
    waits_since       datetime(6),
    last_error        longtext,
    history           longtext     not null,
    bytes             int          not null,
    id                char(36)     character set ascii collate ascii_bin not null,
    topic             varchar(255) not null,
    type              varchar(255) not null,
    payload           longblob     not null,
    `key`             varchar(512),
    routing_key       varchar(255),
    content_type      varchar(255) not null,
    headers           longtext,
    tenant_id         varchar(512),
    aggregate_type    varchar(255),
    aggregate_id      varchar(512),
    aggregate_version bigint,
    occurred_at       datetime(6)  not null,
    -- With the id, since a seq may be another message's after a truncation.
    primary key (route, seq, id),
    key postroom_parked_due (route, due_at),
    key postroom_parked_state (route, state, due_at),
    key postroom_parked_key (route, ordering_key, seq)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
create table if not exists postroom_dead_letters (
    route             varchar(200) not null,
    seq               bigint       not null,
    lane              smallint     not null,
    attempts          int          not null,
    cause             varchar(16)  not null check (cause in ('exhausted', 'permanent', 'poison')),
    error             longtext     not null,
    history           longtext     not null,
    died_at           datetime(6)  not null default (utc_timestamp(6)),
    bytes             int          not null,
    id                char(36)     character set ascii collate ascii_bin not null,
    topic             varchar(255) not null,
    type              varchar(255) not null,
    payload           longblob     not null,
    `key`             varchar(512),
    routing_key       varchar(255),
    content_type      varchar(255) not null,
    headers           longtext,
    tenant_id         varchar(512),
    aggregate_type    varchar(255),
    aggregate_id      varchar(512),
    aggregate_version bigint,
    occurred_at       datetime(6)  not null,
    primary key (route, seq, id)
) engine = InnoDB default character set utf8mb4 collate {collation}
----
create table if not exists postroom_blocked_keys (
    route        varchar(200) not null,
    ordering_key varchar(512) not null,
    seq          bigint       not null,
    blocked_at   datetime(6)  not null default (utc_timestamp(6)),
    reason       longtext     not null,
    primary key (route, ordering_key, seq)
) engine = InnoDB default character set utf8mb4 collate {collation}
