-- The fourth article's table with the types that it names for SQL Server: nvarchar(max) for jsonb, and the server's own types for the rest.
create table outbox_messages (
    id uniqueidentifier not null primary key,
    aggregate_id uniqueidentifier not null,
    aggregate_type nvarchar(64) not null,
    aggregate_version bigint not null default 0,
    type nvarchar(64) not null,
    payload nvarchar(max) not null,
    headers nvarchar(max) not null,
    tenant_id nvarchar(64),
    occurred_at datetime2(6) not null,
    visible_at datetime2(6) not null,
    attempts int not null default 0,
    status smallint not null default 0,
    last_error nvarchar(max),
    routing_key nvarchar(64),
    partition_key nvarchar(64)
);
create index idx_outbox_visibility on outbox_messages (status, visible_at);
create index idx_outbox_tenant on outbox_messages (tenant_id);
create index idx_outbox_type on outbox_messages (type);
