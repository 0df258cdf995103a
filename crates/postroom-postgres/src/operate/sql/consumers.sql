-- How many of these messages each consumer of this database has in its inbox. $1 ids. Consumers are found by jumping from one to the next
-- along the primary key, 100 at most.
with recursive consumers (consumer, number) as (
    (select i.consumer, 1 from postroom.inbox i order by i.consumer limit 1)
    union all
    select (select i.consumer from postroom.inbox i where i.consumer > c.consumer order by i.consumer limit 1), c.number + 1
      from consumers c where c.consumer is not null and c.number < 100
)
select c.consumer, (select count(*) from postroom.inbox i where i.consumer = c.consumer and i.message_id = any ($1::uuid[]))
  from consumers c where c.consumer is not null
