-- The table and its indexes as the fourth article prints them. status: 0 new, 1 sent, 3 dead, 9 being sent.
create table outbox_messages (
    id uuid primary key,
    aggregate_id uuid not null,
    aggregate_type text not null,
    aggregate_version bigint not null default 0,
    type text not null,
    payload jsonb not null,
    headers jsonb not null,
    tenant_id text,
    occurred_at timestamptz not null,
    visible_at timestamptz not null,
    attempts int not null default 0,
    status smallint not null default 0,
    last_error text,
    routing_key text,
    partition_key text
);
create index idx_outbox_visibility on outbox_messages (status, visible_at);
create index idx_outbox_tenant on outbox_messages (tenant_id);
create index idx_outbox_type on outbox_messages (type);
