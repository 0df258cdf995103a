//! What can go out: fresh messages of lanes, and parked ones whose time has come.

use std::collections::{HashMap, HashSet, VecDeque};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Params, Row, Value, params};
use postroom::lane_book::{Asked, Found};

use crate::log::places::json;
use crate::log::row::{Head, MESSAGE, found, get, message};

/// Followers of one parked head that are claimed with it.
const FOLLOWERS_MAX: usize = 200;

/// What a read of the outbox found in one lane.
pub(crate) struct LaneRead {
    pub asked: Asked<i64>,
    /// In order; cut off where bytes ran out.
    pub heads: Vec<Head>,
    /// There may be more.
    pub full: bool,
}

/// Heads of fresh messages, by lane; at most about `bytes` in all, and the first whatever its size.
pub(crate) async fn fresh(
    conn: &mut Conn,
    route: &str,
    asked: Vec<Asked<i64>>,
    bytes: usize,
) -> Result<Vec<LaneRead>, Error> {
    let of_lane = "(select o.lane, o.seq, o.place, o.bytes, o.topic, coalesce(o.visible_at > utc_timestamp(6), 0) as scheduled,
                      (exists (select 1 from postroom_parked p where p.route = r.name and p.seq = o.seq and p.id = o.id)
                       or exists (select 1 from postroom_dead_letters d
                                   where d.route = r.name and d.seq = o.seq and d.id = o.id)) as dealt_with,
                      (exists (select 1 from postroom_parked p
                                where p.route = r.name and p.ordering_key = coalesce(o.`key`, o.aggregate_id)
                                  and p.state <> 'scheduled')
                       or exists (select 1 from postroom_blocked_keys b
                                   where b.route = r.name and b.ordering_key = coalesce(o.`key`, o.aggregate_id))) as behind
                 from postroom_routes r
                 straight_join postroom_outbox o on o.lane = ? and o.place > ?
                where r.name = ? order by o.place limit ?)";
    // One statement for all lanes; there are as many different ones as lanes, which the connection keeps prepared.
    let sql = vec![of_lane; asked.len()].join(" union all ");
    let mut parameters: Vec<Value> = Vec::with_capacity(4 * asked.len());
    for asked in &asked {
        let limit = i64::try_from(asked.limit).unwrap_or(i64::MAX);
        parameters.extend([asked.lane.into(), asked.position.into(), route.into(), limit.into()]);
    }
    let rows: Vec<Row> = conn.exec(sql, Params::Positional(parameters)).await?;
    let mut found: HashMap<u16, VecDeque<Head>> = HashMap::new();
    for row in rows {
        let head = Head::of(row)?;
        found.entry(head.lane).or_default().push_back(head);
    }
    let (mut reads, mut waiting) = (Vec::with_capacity(asked.len()), Vec::with_capacity(asked.len()));
    for asked in asked {
        let mut found = found.remove(&asked.lane).unwrap_or_default();
        found.make_contiguous().sort_by_key(|head| head.place);
        let full = found.len() >= asked.limit;
        waiting.push(found);
        reads.push(LaneRead { asked, heads: Vec::new(), full });
    }
    // In turns, so that no lane uses up the bytes of the others.
    let mut weight = 0;
    'all: loop {
        let mut any = false;
        for (read, waiting) in reads.iter_mut().zip(&mut waiting) {
            let Some(head) = waiting.pop_front() else { continue };
            if weight >= bytes && weight > 0 {
                waiting.push_front(head);
                break 'all;
            }
            weight += head.bytes;
            read.heads.push(head);
            any = true;
        }
        if !any {
            break;
        }
    }
    for (read, waiting) in reads.iter_mut().zip(&waiting) {
        read.full |= !waiting.is_empty();
    }
    Ok(reads)
}

/// The messages of these rows of the outbox, by seq. One that somebody deleted meanwhile is missing.
pub(crate) async fn messages(conn: &mut Conn, heads: &[&Head]) -> Result<HashMap<i64, Found>, Error> {
    if heads.is_empty() {
        return Ok(HashMap::new());
    }
    let seqs: Vec<i64> = heads.iter().map(|head| head.seq).collect();
    let sql = format!(
        "select straight_join o.seq, {MESSAGE} from json_table(?, '$[*]' columns (seq bigint path '$')) n
           join postroom_outbox o on o.seq = n.seq"
    );
    let rows: Vec<Row> = conn.exec(sql, (json(&seqs),)).await?;
    let heads: HashMap<i64, &Head> = heads.iter().map(|head| (head.seq, *head)).collect();
    let mut all = HashMap::with_capacity(rows.len());
    for mut row in rows {
        let seq: i64 = get(&mut row, "seq")?;
        if let Some(head) = heads.get(&seq) {
            all.insert(seq, found(head, 0, message(&mut row)?));
        }
    }
    Ok(all)
}

/// Parked messages that can go out, in the order of their seqs: heads of their keys that are due, each with what queues behind it, up to the next
/// head of the key, which waits for its own time. And whether there was more.
pub(crate) async fn parked(
    conn: &mut Conn,
    route: &str,
    lanes: &[u16],
    in_hand: &HashSet<i64>,
    (limit, bytes): (usize, usize),
) -> Result<(Vec<(u16, Found)>, bool), Error> {
    let sql = "select p.lane, p.seq, p.bytes, p.state, p.ordering_key
                 from postroom_parked p
                where p.route = :route and p.due_at <= utc_timestamp(6) and p.state <> 'queued'
                  and p.lane in (select n.lane from json_table(:lanes, '$[*]' columns (lane smallint path '$')) n)
                  and (p.ordering_key is null or not exists (
                          select 1 from postroom_parked e
                           where e.route = :route and e.ordering_key = p.ordering_key and e.state <> 'scheduled' and e.seq < p.seq))
                  and not exists (select 1 from postroom_blocked_keys b where b.route = :route and b.ordering_key = p.ordering_key)
                order by p.due_at, p.seq limit :count";
    let count = i64::try_from(limit.saturating_add(in_hand.len())).unwrap_or(i64::MAX);
    let parameters = params! { "route" => route, "lanes" => json(lanes), "count" => count };
    let rows: Vec<(u16, i64, i64, String, Option<String>)> = conn.exec(sql, parameters).await?;
    let full = rows.len() as i64 >= count;
    // A head in hand keeps its followers back.
    let heads: Vec<_> = rows.into_iter().filter(|(_, seq, ..)| !in_hand.contains(seq)).take(limit).collect();
    let mut chosen: Vec<(i64, i64)> = heads.iter().map(|(_, seq, bytes, ..)| (*seq, *bytes)).collect();
    // In the order of the index, so that the queue of a key is not read to its end for its beginning.
    let sql = "select p.seq, p.bytes, p.state from postroom_parked p force index (postroom_parked_key)
                where p.route = :route and p.ordering_key = :key and p.seq > :head and p.state <> 'scheduled'
                order by p.seq limit :count";
    for (_, head, _, _, key) in heads.iter().filter(|(_, _, _, state, _)| state == "retry") {
        if chosen.len() >= limit {
            break;
        }
        let count = FOLLOWERS_MAX.min(limit - chosen.len()) as i64;
        let parameters = params! { "route" => route, "key" => key, "head" => head, "count" => count };
        let behind: Vec<(i64, i64, String)> = conn.exec(sql, parameters).await?;
        // The next head of the key waits for its own time.
        let followers = behind.into_iter().take_while(|(_, _, state)| state == "queued");
        chosen.extend(followers.map(|(seq, bytes, _)| (seq, bytes)).filter(|(seq, _)| !in_hand.contains(seq)));
    }
    chosen.sort_unstable();
    let (mut weight, mut seqs, mut cut) = (0, Vec::new(), false);
    for (seq, size) in chosen {
        if weight >= bytes && !seqs.is_empty() {
            cut = true;
            break;
        }
        weight += size.max(0) as usize;
        seqs.push(seq);
    }
    if seqs.is_empty() {
        return Ok((Vec::new(), false));
    }
    let sql = format!(
        "select straight_join o.lane, o.seq, o.attempts,
                (select max(w.operation) from postroom_operation_watch w
                   join postroom_operations a on a.id = w.operation and a.kind = 'replay' and a.route = :route
                  where w.message_id = o.id and w.seq = o.seq) as replay, {MESSAGE} from json_table(:seqs, '$[*]' columns (seq bigint path '$')) n
           join postroom_parked o on o.route = :route and o.seq = n.seq order by o.seq"
    );
    let rows: Vec<Row> = conn.exec(sql, params! { "seqs" => json(&seqs), "route" => route }).await?;
    let mut all = Vec::with_capacity(rows.len());
    for mut row in rows {
        let (lane, seq, attempts) = (get(&mut row, "lane")?, get(&mut row, "seq")?, get(&mut row, "attempts")?);
        let head = Head {
            lane,
            seq,
            place: 0,
            bytes: 0,
            topic: String::new(),
            scheduled: false,
            behind: false,
            dealt_with: false,
        };
        let replay = get::<Option<String>>(&mut row, "replay")?.and_then(|id| id.parse().ok());
        all.push((lane, Found { replay, ..found(&head, attempts, message(&mut row)?) }));
    }
    Ok((all, cut || full))
}
