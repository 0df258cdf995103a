-- Which process fills the inbox of a consumer: one at a time, or the messages of a key would be kept in the order in which
-- several happen to commit. Every transaction that keeps messages is fenced by owner and epoch. The clock only says when
-- somebody else may try to take over; so does a lease that nobody was seen to renew.
create table postroom.inbox_fillers (
    consumer   text        primary key check (octet_length(consumer) between 1 and 255),
    owner      text,                                    -- null: given back
    epoch      bigint      not null,
    lease_ms   bigint      not null check (lease_ms > 0),
    expires_at timestamptz not null
) with (fillfactor = 50);
