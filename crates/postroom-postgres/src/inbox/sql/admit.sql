-- Claim first: the primary key decides. A concurrent claim of the same pair waits for the other transaction's end.
insert into postroom.inbox (consumer, message_id) values ($1, $2) on conflict (consumer, message_id) do nothing
