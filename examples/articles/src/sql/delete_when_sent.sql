-- The second article describes its table in words: an id, a message and a time; a row is deleted when it was sent.
create table outbox (
    id uuid primary key,
    message text not null,
    "timestamp" timestamptz not null
);
