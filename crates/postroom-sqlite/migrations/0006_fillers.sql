-- Which process fills the inbox of a consumer: one at a time. Every transaction that keeps messages is fenced by owner and
-- epoch. `owner` is null when it was given back.
create table postroom_inbox_fillers (
    consumer   text    primary key,
    owner      text,
    epoch      integer not null,
    lease_ms   integer not null check (lease_ms > 0),
    expires_ms integer not null
) without rowid;
