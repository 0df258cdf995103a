//! Gives places to rows that have none. A transaction may be committed long after one with higher seqs; whoever reads a lane in the order of
//! places sees its rows all the same, since they get their places when they are there to be seen.

use std::collections::HashMap;

use tiberius::error::Error;

use crate::conn::Conn;
use crate::sql::{json, named};

/// Rows without a place in these lanes get the next ones, in the order of their seqs, at most about `limit` of them; whether there were
/// as many. Several processes may do so: one lane is one process's at a time, and its places are there for others to see in their order.
pub(crate) async fn give(conn: &mut Conn, lanes: &[u16], limit: usize) -> Result<bool, Error> {
    // The database has `read_committed_snapshot` on, so each read sees whole transactions that were committed before it, and waits for none. Passing by
    // locked rows would not do: of two rows of one transaction the second can be free before the first.
    let sql = "select n.lane from openjson(@lanes) with (lane smallint '$') n
                where exists (select 1 from postroom_outbox o where o.lane = n.lane and o.place is null)";
    let waiting: Vec<u16> = conn.query(sql, named! { "lanes" => json(lanes) }).await?;
    if waiting.is_empty() {
        return Ok(false);
    }
    let each = limit.div_ceil(waiting.len()).max(1);
    conn.begin().await?;
    let sql = "select p.lane, p.next_place, coalesce((select max(l.position) from postroom_lanes l where l.lane = p.lane), 0) + 1
                 from (select top (2000000000) j.lane from openjson(@lanes) with (lane smallint '$') j order by j.lane) n
                 join postroom_places p with (updlock, rowlock, forceseek) on p.lane = n.lane
                order by p.lane
               option (loop join, force order)";
    let counters: Vec<(u16, i64, i64)> = conn.query(sql, named! { "lanes" => json(&waiting) }).await?;
    let (mut given, mut next, mut full) = (Vec::new(), HashMap::new(), false);
    for (lane, counter, behind_positions) in counters {
        // The counter may be that of a backup, or rows may have been put back: no place at or below a position is given again.
        let last = "select top (1) o.place from postroom_outbox o where o.lane = convert(smallint, @lane) and o.place is not null order by o.place desc";
        let last: Option<i64> = conn.first(last, named! { "lane" => lane }).await?;
        let mut place = counter.max(behind_positions).max(last.unwrap_or_default().saturating_add(1));
        let sql = "select top (@count) o.seq from postroom_outbox o
                    where o.lane = convert(smallint, @lane) and o.place is null order by o.seq";
        let seqs: Vec<i64> = conn.query(sql, named! { "lane" => lane, "count" => each }).await?;
        full |= seqs.len() >= each;
        for seq in seqs {
            given.push((seq, place));
            place += 1;
        }
        next.insert(lane, place);
    }
    let next: Vec<(u16, i64)> = next.into_iter().collect();
    // Not in parallel: the check of the column reads the session's context, which SQL Server has had wrong there.
    let sql = "update o set place = n.place
                 from openjson(@given) with (seq bigint '$[0]', place bigint '$[1]') n
                 join postroom_outbox o with (rowlock) on o.seq = n.seq
                where o.place is null
               option (loop join, force order, maxdop 1)";
    conn.exec(sql, named! { "given" => json(&given) }).await?;
    let sql = "update p set next_place = n.place
                 from openjson(@next) with (lane smallint '$[0]', place bigint '$[1]') n
                 join postroom_places p with (rowlock) on p.lane = n.lane
               option (loop join, force order)";
    conn.exec(sql, named! { "next" => json(&next) }).await?;
    conn.commit().await?;
    Ok(full)
}
