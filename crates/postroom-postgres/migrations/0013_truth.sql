-- What is known of a message, and what is not.

-- Where a route began that was to start from its first moment: what this snapshot sees, up to this seq, was never sent on the route.
alter table postroom.lanes
    add column start_snapshot pg_snapshot,
    add column start_seq      bigint;

-- Whether an operator acted on a message.
create index audit_ids on postroom.audit using gin (message_ids);

-- Refuses messages of topics that no route takes. With the rights of the owner: a writer may not read the routes.
create function postroom.refuse_unrouted() returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if not exists (select from postroom.routes r cross join unnest(r.topics) t
                    where new.topic = t or (t like '%*' and starts_with(new.topic, left(t, -1)))) then
        raise exception 'postroom: no route takes topic %, and strict topics are on', quote_literal(new.topic)
            using errcode = 'check_violation',
                  hint = 'mistyped? `postroom routes list` shows the topics of each route; `select postroom.strict_topics(false)` turns this off';
    end if;
    return new;
end
$$;
revoke execute on function postroom.refuse_unrouted() from public;

-- Turns that on or off, for every way of writing; off is the default. For the owner of the schema.
create function postroom.strict_topics(wanted boolean) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    drop trigger if exists strict_topics on postroom.outbox;
    if wanted then
        create trigger strict_topics before insert on postroom.outbox for each row execute function postroom.refuse_unrouted();
    end if;
end
$$;
revoke execute on function postroom.strict_topics(boolean) from public;
