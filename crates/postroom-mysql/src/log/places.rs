//! Gives places to rows that have none. A transaction may be committed long after one with higher seqs; whoever reads a lane in the order of
//! places sees its rows all the same, since they get their places when they are there to be seen.

use std::collections::HashMap;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Params, TxOpts};

/// Rows without a place in these lanes get the next ones, in the order of their seqs, at most about `limit` of them; whether there were
/// as many. Several processes may do so: one lane is one process's at a time, and its places are there for others to see in their order.
pub(crate) async fn give(conn: &mut Conn, lanes: &[u16], limit: usize) -> Result<bool, Error> {
    let list = json(lanes);
    // Without a lock: most looks find nothing.
    let sql = "select straight_join n.lane from json_table(?, '$[*]' columns (lane smallint path '$')) n
                where exists (select 1 from postroom_outbox o where o.lane = n.lane and o.place is null)";
    let waiting: Vec<u16> = conn.exec(sql, (&list,)).await?;
    if waiting.is_empty() {
        return Ok(false);
    }
    let each = limit.div_ceil(waiting.len()).max(1);
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    let sql = "select p.lane, greatest(p.next_place,
                      coalesce((select max(l.position) from postroom_routes r
                                 straight_join postroom_lanes l force index (primary) on l.route = r.name and l.lane = p.lane), 0) + 1)
                 from postroom_places p
                where p.lane in (select n.lane from json_table(?, '$[*]' columns (lane smallint path '$')) n)
                order by p.lane for update";
    let counters: Vec<(u16, i64)> = tx.exec(sql, (json(&waiting),)).await?;
    // The lane is a value in each part: where it comes from another table, MySQL sorts all rows of the lane for the last of them.
    let of_lane =
        "(select o.lane, o.place, null as seq from postroom_outbox o where o.lane = ? order by o.place desc limit 1)
         union all
         (select o.lane, null, o.seq from postroom_outbox o where o.lane = ? and o.place is null order by o.seq limit ?)";
    let sql = vec![of_lane; counters.len()].join(" union all ");
    let parameters = counters.iter().flat_map(|(lane, _)| [(*lane).into(), (*lane).into(), (each as u64).into()]);
    let found: Vec<(u16, Option<i64>, Option<i64>)> = tx.exec(sql, Params::Positional(parameters.collect())).await?;
    let mut next: HashMap<u16, i64> = counters.into_iter().collect();
    // The counter may be that of a backup, or rows may have been put back: no place at or below a position is given again.
    for (lane, place, _) in &found {
        if let (Some(next), Some(last)) = (next.get_mut(lane), place) {
            *next = last.saturating_add(1).max(*next);
        }
    }
    let mut rows: Vec<(u16, i64)> = found.into_iter().filter_map(|(lane, _, seq)| Some((lane, seq?))).collect();
    rows.sort_unstable();
    let (mut given, mut full) = (Vec::with_capacity(rows.len()), false);
    for chunk in rows.chunk_by(|(lane, _), (other, _)| lane == other) {
        full |= chunk.len() >= each;
        for (lane, seq) in chunk {
            let place = next.entry(*lane).or_default();
            given.push((*seq, *place));
            *place += 1;
        }
    }
    let next: Vec<(u16, i64)> = next.into_iter().collect();
    let sql = "update json_table(?, '$[*]' columns (seq bigint path '$[0]', place bigint path '$[1]')) n
                 straight_join postroom_outbox o force index (primary) on o.seq = n.seq
                  set o.place = n.place";
    tx.exec_drop(sql, (json(&given),)).await?;
    let sql = "update json_table(?, '$[*]' columns (lane smallint path '$[0]', place bigint path '$[1]')) n
                 straight_join postroom_places p force index (primary) on p.lane = n.lane
                  set p.next_place = n.place";
    tx.exec_drop(sql, (json(&next),)).await?;
    tx.commit().await?;
    Ok(full)
}

/// A list for `json_table`.
pub(crate) fn json(value: &(impl serde::Serialize + ?Sized)) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "[]".to_owned())
}
