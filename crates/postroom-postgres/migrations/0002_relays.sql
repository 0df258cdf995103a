-- Which relays are alive, so that they can share the lanes of a route. Only a hint for the division: who may write is decided
-- by owner and epoch in postroom.lanes alone.
create table postroom.relays (
    route      text        not null,
    owner      text        not null,
    expires_at timestamptz not null,
    primary key (route, owner)
);
