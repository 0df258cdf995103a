create function sysutcdatetime() returns timestamp(6) stable language sql as $$ select (statement_timestamp() at time zone 'UTC')::timestamp(6) $$;
create function hashbytes(text, text) returns bytea immutable language sql as $$ select sha256(convert_to($2, 'UTF8')) $$;
create function two_bytes(bytea) returns int immutable language sql as $$ select get_byte($1, 0) * 256 + get_byte($1, 1) $$;
create function lane_of(text, int) returns smallint immutable language sql as
    $$ select ((get_byte(sha256(convert_to($1, 'UTF8')), 0) * 256 + get_byte(sha256(convert_to($1, 'UTF8')), 1)) % $2)::smallint $$;
create function datediff_big(text, timestamp, timestamp) returns bigint immutable language sql as
    $$ select (extract(epoch from $3 - $2) * case $1 when 'second' then 1 else 1000000 end)::bigint $$;
create function getdate() returns timestamp(6) stable language sql as $$ select statement_timestamp()::timestamp(6) $$;
create function charindex(text, text) returns int immutable language sql as $$ select strpos($2, $1) $$;
create function datalength(bytea) returns int immutable language sql as $$ select octet_length($1) $$;
create function datalength(text) returns int immutable language sql as $$ select octet_length($1) $$;
create function json_value(text, text) returns text immutable language sql as $$ select $1::jsonb ->> replace($2, '$.', '') $$;
create function json_modify(text, text, text) returns text immutable language sql as
    $$ select jsonb_set($1::jsonb, array[trim(replace($2, '$.', ''), '"')], to_jsonb($3))::text $$;
create function ident_current(text) returns bigint language plpgsql as $$
    declare newest bigint; begin
    execute format('select last_value from %s', pg_get_serial_sequence($1, 'seq')) into newest; return newest; end $$;
create function current_transaction_id() returns bigint language sql as $$ select pg_current_xact_id()::text::bigint $$;
create function xact_state() returns int language sql as $$ select 1 $$;
create function serverproperty(text) returns text language sql as $$ select '15.0.0.0' $$;
create function object_id(text) returns bigint stable language sql as $$ select to_regclass(translate($1, '[]', ''))::oid::bigint $$;
create function dateadd(text, bigint, timestamp) returns timestamp immutable language sql as
    $$ select $3 + ($2::text || ' ' || $1)::interval $$;
create function iso(timestamp) returns text immutable language sql as $$ select to_char($1, 'YYYY-MM-DD"T"HH24:MI:SS.US') $$;
create function is_object(text) returns boolean immutable language plpgsql as
    $$ begin return json_typeof($1::json) = 'object'; exception when others then return false; end $$;
create function db_id() returns int immutable language sql as $$ select 1 $$;
create schema sys;
create view sys.databases as select 1 as is_read_committed_snapshot_on, 150 as compatibility_level, 1 as database_id, 0 as delayed_durability,
    2 as page_verify_option, 0 as is_read_only;
create view sys.tables as select c.relname::text as name, c.oid::bigint as object_id from pg_class c
    where c.relkind = 'r' and c.relnamespace = 'public'::regnamespace;
create view sys.partitions as
    select c.oid::bigint as object_id, 1 as index_id, c.oid::bigint as partition_id, greatest(c.reltuples, 0)::bigint as rows from pg_class c where c.relkind = 'r'
    union all select i.indrelid::bigint, 2, i.indexrelid::bigint, 0 from pg_index i;
create view sys.allocation_units as select c.oid::bigint as container_id, pg_relation_size(c.oid) / 8192 as total_pages from pg_class c where c.relkind in ('r', 'i');
create view sys.objects as select c.oid::bigint as object_id, c.relname::text as name, case c.relkind when 'r' then 'U' else 'V' end as type,
    c.relnamespace::bigint as schema_id from pg_class c where c.relkind in ('r', 'v') and c.relnamespace = 'public'::regnamespace;
create view sys.schemas as select oid::bigint as schema_id, nspname::text as name from pg_namespace;
create view sys.types as select oid::bigint as user_type_id,
    case typname when 'int2' then 'smallint' when 'int4' then 'int' when 'int8' then 'bigint' when 'bytea' then 'varbinary' when 'timestamp' then 'datetime2'
                 when 'text' then 'nvarchar' when 'varchar' then 'nvarchar' else typname::text end as name from pg_type;
create view sys.columns as select a.attrelid::bigint as object_id, a.attnum::int as column_id, a.attname::text as name, a.atttypid::bigint as system_type_id,
    case when a.atttypid in ('text'::regtype, 'bytea'::regtype) then -1 when a.atttypid = 'varchar'::regtype then (a.atttypmod - 4) * 2 else a.attlen::int end as max_length,
    0 as precision, 6 as scale, case when a.attnotnull then 0 else 1 end as is_nullable, case when a.attgenerated <> '' then 1 else 0 end as is_computed,
    case when a.attidentity <> '' then 1 else 0 end as is_identity, 0 as generated_always_type,
    case when a.attcollation <> 0 then 'Latin1_General_100_BIN2' end as collation_name
    from pg_attribute a where a.attnum > 0 and not a.attisdropped;
create view sys.indexes as select i.indrelid::bigint as object_id, i.indexrelid::bigint as index_id, c.relname::text as name,
    i.indisunique::int as is_unique, i.indisprimary::int as is_primary_key, (i.indpred is not null)::int as has_filter, 0 as is_disabled, null::text as filter_definition
    from pg_index i join pg_class c on c.oid = i.indexrelid;
create view sys.index_columns as select i.indrelid::bigint as object_id, i.indexrelid::bigint as index_id, k.attnum::int as column_id, k.place::int as key_ordinal,
    0 as is_included_column, k.place::int as index_column_id from pg_index i cross join lateral unnest(i.indkey) with ordinality k(attnum, place);
create view sys.dm_tran_active_transactions as select 0::bigint as transaction_id, null::timestamp as transaction_begin_time where false;
create view sys.dm_tran_session_transactions as select 0::bigint as transaction_id, 1 as is_user_transaction where false;
create view sys.dm_exec_requests as select 0 as session_id, 0 as sql_handle where false;
create view sys.dm_exec_sessions as select 0 as session_id, 1 as database_id, '' as login_name, null::text as host_name where false;
create function sys.dm_exec_sql_text(int) returns table (text text) language sql as $$ select '' $$;

create or replace function newid() returns text language sql volatile as $$ select gen_random_uuid()::text $$;
