-- The highest seq that is parked or dead. Asked when lanes were taken: later on no row above a position is either, since only the
-- lane's owner parks and buries, and only what it has read. Places of replayed messages (postroom.replay_seq) are none of the outbox.
-- $1 route.
select greatest((select max(seq) from postroom.parked where route = $1 and seq < 4611686018427387904),
                (select max(seq) from postroom.dead_letters where route = $1 and seq < 4611686018427387904), 0)
