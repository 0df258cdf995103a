-- A relay that dies with one message alone in flight has died over that message only if publishing was possible: something had
-- been stored since it began, and the sink was not blocked. Otherwise an outage may have had the same end, and it is a doubt.
alter table postroom.suspects
    add column proven boolean not null default true, -- a relay of an older version notes nothing about it
    add column doubts integer not null default 0;
