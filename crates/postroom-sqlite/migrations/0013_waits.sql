-- Since when a message that a consumer kept waits, by the clock of that moment: a wait that was noted with a clock that was ahead
-- shows by it. `postroom_inbox_clocks` now says when waits were looked at last.
alter table postroom_inbox_messages add column waits_since_ms integer;
