-- Keys of which a message waits. A statement of its own after the claim: it has to see what the claim waited for.
-- $1 consumer, $2 keys.
select a.arriving as ordering_key from pg_catalog.unnest($2::text[]) as a (arriving)
 where exists (select from postroom.inbox_messages m
                where m.consumer = $1 and m.ordering_key = a.arriving and m.state in ('new', 'ready', 'behind', 'claimed'))
