-- Claims messages for a consumer, in one order for all so that none deadlock. $1 consumer, $2 ids. Returns the new ones.
insert into postroom.inbox (consumer, message_id)
select $1, id from pg_catalog.unnest($2::uuid[]) id order by id
    on conflict (consumer, message_id) do nothing
returning message_id
