-- By age with a B-tree: where rows are deleted and their space is used again, old and new ones lie side by side, and an index of block
-- ranges finds nothing. A step of pruning begins where the one before ended, and one with nothing to do reads a few pages.
drop index postroom.inbox_age;
create index inbox_age on postroom.inbox (processed_at);

create or replace function postroom.inbox_prune(older_than interval, max integer default 10000) returns bigint
language plpgsql volatile
as $$
declare
    horizon interval := (select s.redelivery_horizon from postroom.settings s);
    -- In a variable: compared with a clock that moves, no index is of use.
    oldest  timestamptz := clock_timestamp() - inbox_prune.older_than;
    pruned  bigint;
begin
    if inbox_prune.older_than < horizon then
        raise exception 'postroom.inbox_prune: % is shorter than the redelivery horizon of %; nothing was pruned',
            inbox_prune.older_than, horizon
            using errcode = 'invalid_parameter_value',
                  hint = 'a message that comes again after its row is gone has its effect twice; change redelivery_horizon in postroom.settings only when nothing can be delivered again so late';
    end if;
    with old as (
        select i.ctid from postroom.inbox i
         where i.processed_at < oldest
           -- One that waits would have its effect a second time.
           and not exists (select from postroom.inbox_messages m where m.consumer = i.consumer and m.message_id = i.message_id)
         order by i.processed_at limit inbox_prune.max
    ), gone as (
        delete from postroom.inbox i using old where i.ctid = old.ctid returning 1
    )
    select count(*) into pruned from gone;
    return pruned;
end
$$;
