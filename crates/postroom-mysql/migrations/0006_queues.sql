-- Each take read all messages that waited behind the first one of their key. Now it puts them off for some minutes, and whatever removes the message
-- before makes the next one due. The indexes are for that, for the queue of a key in its order, and for whether a message of the key is claimed. A key
-- itself is too long for an index that ends with seq, so there is a hash of it. Each statement may be repeated.
set @postroom_sql = if(exists (select 1 from information_schema.columns
                                where table_schema = database() and table_name = 'postroom_inbox_messages' and column_name = 'put_off'),
    'do 0',
    'alter table postroom_inbox_messages
        add column put_off tinyint not null default 0,
        add column key_hash binary(32) as (unhex(sha2(ordering_key, 256))) virtual,
        drop key postroom_inbox_messages_due,
        add key postroom_inbox_messages_due (consumer, put_off, due_at, seq),
        drop key postroom_inbox_messages_key,
        add key postroom_inbox_messages_queue (consumer, key_hash, seq),
        add key postroom_inbox_messages_state (consumer, state, key_hash)')
----
prepare postroom_migration from @postroom_sql
----
execute postroom_migration
----
deallocate prepare postroom_migration
