-- The table and its index as the first article prints them. The index holds the whole content, so rows above about 2.7 kB cannot be written:
-- `postroom doctor` says so, and what to do about it.
create table outbox_messages (
    id uuid primary key,
    type varchar(255) not null,
    content jsonb not null,
    occurred_on_utc timestamp with time zone not null,
    processed_on_utc timestamp with time zone null,
    error text null
);
create index if not exists idx_outbox_messages_unprocessed
    on outbox_messages (occurred_on_utc, processed_on_utc)
    include (id, type, content)
    where processed_on_utc is null;
