create function sysutcdatetime() returns timestamp(6) stable language sql as $$ select (statement_timestamp() at time zone 'UTC')::timestamp(6) $$;
create function hashbytes(text, text) returns bytea immutable language sql as $$ select sha256(convert_to($2, 'UTF8')) $$;
create function lane_of(text, int) returns smallint immutable language sql as
    $$ select ((get_byte(sha256(convert_to($1, 'UTF8')), 0) * 256 + get_byte(sha256(convert_to($1, 'UTF8')), 1)) % $2)::smallint $$;
create function datediff_big(text, timestamp, timestamp) returns bigint immutable language sql as
    $$ select (extract(epoch from $3 - $2) * 1000000)::bigint $$;
create function dateadd(text, bigint, timestamp) returns timestamp immutable language sql as
    $$ select $3 + ($2::text || ' ' || $1)::interval $$;
create function iso(timestamp) returns text immutable language sql as $$ select to_char($1, 'YYYY-MM-DD"T"HH24:MI:SS.US') $$;
create function is_object(text) returns boolean immutable language plpgsql as
    $$ begin return json_typeof($1::json) = 'object'; exception when others then return false; end $$;
create function db_id() returns int immutable language sql as $$ select 1 $$;
create schema sys;
create view sys.databases as select 1 as is_read_committed_snapshot_on, 150 as compatibility_level, 1 as database_id;
create view sys.tables as select tablename::text as name from pg_tables where schemaname = 'public';
