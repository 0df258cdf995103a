-- A claimed message is dead. $1 consumer, $2 id, $3 claim, $4 attempts burned, $5 cause, $6 error.
with mine as materialized (
    select m.consumer, m.message_id from postroom.inbox_messages m
     where m.consumer = $1 and m.message_id = $2 and m.claim = $3 and m.state = 'claimed'
       for update
)
select postroom.inbox_bury(consumer, message_id, $4, $5, $6) from mine
