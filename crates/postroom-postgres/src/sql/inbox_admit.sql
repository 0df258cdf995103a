-- Claims messages for a consumer, in one order for all so that none deadlock, and says which of them have another of their
-- key waiting before them. $1 consumer, $2 ids, $3 keys; parallel arrays. The answers come in the order of the arrays.
with arrivals as (
    select id, key, n from unnest($2::uuid[], $3::text[]) with ordinality a (id, key, n)
), claimed as (
    insert into postroom.inbox (consumer, message_id)
    select $1, id from arrivals order by id
        on conflict (consumer, message_id) do nothing
    returning message_id
)
select c.message_id is not null,
       a.key is not null and exists (select from postroom.inbox_messages m
                                      where m.consumer = $1 and m.ordering_key = a.key
                                        and m.state in ('new', 'ready', 'behind', 'claimed'))
  from arrivals a left join claimed c on c.message_id = a.id
 order by a.n
