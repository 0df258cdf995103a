-- How large the file and the tables in it are, hour by hour, so that growth can be told. Bytes are those of the whole file.
create table postroom_sizes (
    name  text    not null,
    at_ms integer not null,
    rows  integer not null,
    bytes integer,
    primary key (name, at_ms)
) strict;
