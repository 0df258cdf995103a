-- Each take read all messages that waited behind the first one of their key. Now it puts them off for some minutes, and the message before, when it
-- leaves the queue, makes the next one due.
alter table postroom_inbox_messages add column put_off integer not null default 0;

create trigger postroom_inbox_left after delete on postroom_inbox_messages
when old.ordering_key is not null and old.state <> 'early'
begin
    update postroom_inbox_messages set due_ms = cast(unixepoch('subsec') * 1000 as integer), put_off = 0
     where put_off and seq = (select n.seq from postroom_inbox_messages n
                               where n.consumer = old.consumer and n.ordering_key = old.ordering_key and n.state <> 'early'
                               order by n.seq limit 1);
end;
create trigger postroom_inbox_stepped_aside after update of state on postroom_inbox_messages
when old.ordering_key is not null and old.state <> 'early' and new.state = 'early'
begin
    update postroom_inbox_messages set due_ms = cast(unixepoch('subsec') * 1000 as integer), put_off = 0
     where put_off and seq = (select n.seq from postroom_inbox_messages n
                               where n.consumer = old.consumer and n.ordering_key = old.ordering_key and n.state <> 'early'
                               order by n.seq limit 1);
end;

drop index postroom_inbox_messages_due;
create index postroom_inbox_messages_due on postroom_inbox_messages (consumer, put_off, due_ms, seq);
-- Whether a message of the key is claimed; and the versions of an aggregate that wait.
create index postroom_inbox_messages_claimed on postroom_inbox_messages (consumer, ordering_key) where state = 'claimed';
create index postroom_inbox_messages_version on postroom_inbox_messages (consumer, aggregate_type, aggregate_id, aggregate_version)
    where aggregate_version is not null;
