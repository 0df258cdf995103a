-- Deletes dead letters of consumption. $1 consumers, $2 seqs; parallel arrays.
delete from postroom.dead_consume d
 using unnest($1::text[], $2::bigint[]) as c (consumer, seq)
 where d.consumer = c.consumer and d.seq = c.seq
returning d.consumer, d.seq
