-- $1 consumer, $2 owner, $3 seconds of the lease.
select postroom.inbox_renew($1, $2, $3::float8 * interval '1 second')
