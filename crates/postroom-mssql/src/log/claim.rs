//! What can go out: fresh messages of lanes, and parked ones whose time has come.

use std::collections::{HashMap, HashSet};

use postroom::lane_book::{Asked, Found};
use tiberius::error::Error;

use crate::conn::Conn;
use crate::log::row::{Head, MESSAGE, found, message};
use crate::sql::{get, json, named};

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
    let sql = "select x.*
                 from openjson(@asked) with (lane smallint '$[0]', position bigint '$[1]', most bigint '$[2]') n
                cross apply (
                    select top (n.most) o.lane, o.seq, o.place, o.bytes, o.topic,
                           case when o.visible_at > sysutcdatetime() then 1 else 0 end as scheduled,
                           case when exists (select 1 from postroom_parked p where p.route = @route and p.seq = o.seq and p.id = o.id)
                                  or exists (select 1 from postroom_dead_letters d where d.route = @route and d.seq = o.seq and d.id = o.id)
                                then 1 else 0 end as dealt_with,
                           case when exists (select 1 from postroom_parked p
                                              where p.route = @route and p.state <> 'scheduled'
                                                and p.key_hash = convert(binary(32), hashbytes('SHA2_256', coalesce(o.[key], o.aggregate_id))))
                                  or exists (select 1 from postroom_blocked_keys b
                                              where b.route = @route
                                                and b.key_hash = convert(binary(32), hashbytes('SHA2_256', coalesce(o.[key], o.aggregate_id))))
                                then 1 else 0 end as behind
                      from postroom_outbox o
                     where o.lane = n.lane and o.place > n.position
                     order by o.place) x
               option (loop join, force order)";
    let limit = |limit| i64::try_from(limit).unwrap_or(i64::MAX);
    let lanes: Vec<_> = asked.iter().map(|asked| (asked.lane, asked.position, limit(asked.limit))).collect();
    let mut found: HashMap<u16, Vec<Head>> = HashMap::new();
    for row in conn.rows(sql, named! { "route" => route, "asked" => json(&lanes) }).await? {
        let head = Head::of(&row)?;
        found.entry(head.lane).or_default().push(head);
    }
    let (mut reads, mut waiting) = (Vec::with_capacity(asked.len()), Vec::with_capacity(asked.len()));
    for asked in asked {
        let mut found = found.remove(&asked.lane).unwrap_or_default();
        found.sort_by_key(|head| head.place);
        let full = found.len() >= asked.limit;
        waiting.push(found.into_iter().peekable());
        reads.push(LaneRead { asked, heads: Vec::new(), full });
    }
    // In turns, so that no lane uses up the bytes of the others.
    let (mut weight, mut any) = (0, true);
    while any && (weight < bytes || weight == 0) {
        any = false;
        for (read, waiting) in reads.iter_mut().zip(&mut waiting) {
            if weight < bytes || weight == 0 {
                let head = waiting.next();
                any |= head.is_some();
                weight += head.as_ref().map_or(0, |head| head.bytes);
                read.heads.extend(head);
            }
        }
    }
    for (read, waiting) in reads.iter_mut().zip(&mut waiting) {
        read.full |= waiting.peek().is_some();
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
        "select o.seq, {MESSAGE} from openjson(@seqs) with (seq bigint '$') n
           join postroom_outbox o on o.seq = n.seq
         option (loop join, force order)"
    );
    let rows = conn.rows(&sql, named! { "seqs" => json(&seqs) }).await?;
    let heads: HashMap<i64, &Head> = heads.iter().map(|head| (head.seq, *head)).collect();
    let mut all = HashMap::with_capacity(rows.len());
    for row in rows {
        let seq: i64 = get(&row, "seq")?;
        if let Some(head) = heads.get(&seq) {
            all.insert(seq, found(head, 0, message(&row)?));
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
    let sql = "select top (@count) p.lane, p.seq, p.bytes, p.state, p.ordering_key
                 from postroom_parked p
                where p.route = @route and p.due_at <= sysutcdatetime() and p.state <> 'queued'
                  and p.lane in (select n.lane from openjson(@lanes) with (lane smallint '$') n)
                  and (p.ordering_key is null or not exists (
                          select 1 from postroom_parked e
                           where e.route = @route and e.key_hash = p.key_hash and e.state <> 'scheduled' and e.seq < p.seq))
                  and not exists (select 1 from postroom_blocked_keys b where b.route = @route and b.key_hash = p.key_hash)
                order by p.due_at, p.seq";
    let count = limit.saturating_add(in_hand.len());
    let parameters = named! { "route" => route, "lanes" => json(lanes), "count" => count };
    let rows: Vec<(u16, i64, i64, String, Option<String>)> = conn.query(sql, parameters).await?;
    let full = rows.len() >= count;
    // A head in hand keeps its followers back.
    let heads: Vec<_> = rows.into_iter().filter(|(_, seq, ..)| !in_hand.contains(seq)).take(limit).collect();
    let mut chosen: Vec<(i64, i64)> = heads.iter().map(|(_, seq, bytes, ..)| (*seq, *bytes)).collect();
    let sql = "select top (@count) p.seq, p.bytes, p.state from postroom_parked p
                where p.route = @route and p.key_hash = convert(binary(32), hashbytes('SHA2_256', @key)) and p.seq > @head and p.state <> 'scheduled'
                order by p.seq";
    for (_, head, _, _, key) in heads.iter().filter(|(_, _, _, state, _)| state == "retry") {
        if chosen.len() >= limit {
            break;
        }
        let count = FOLLOWERS_MAX.min(limit - chosen.len());
        let parameters = named! { "route" => route, "key" => key.as_ref(), "head" => *head, "count" => count };
        let behind: Vec<(i64, i64, String)> = conn.query(sql, parameters).await?;
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
        "select o.lane, o.seq, o.attempts,
                (select top (1) w.operation from postroom_operation_watch w
                   join postroom_operations a on a.id = w.operation and a.kind = 'replay' and a.route = @route
                  where w.message_id = o.id and w.seq = o.seq order by w.operation desc) as replay, {MESSAGE} from openjson(@seqs) with (seq bigint '$') n
           join postroom_parked o on o.route = @route and o.seq = n.seq order by o.seq"
    );
    let rows = conn.rows(&sql, named! { "seqs" => json(&seqs), "route" => route }).await?;
    let mut all = Vec::with_capacity(rows.len());
    for row in &rows {
        let (lane, seq, attempts) = (get(row, "lane")?, get(row, "seq")?, get(row, "attempts")?);
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
        let replay = get::<Option<String>>(row, "replay")?.and_then(|id| id.parse().ok());
        all.push((lane, Found { replay, ..found(&head, attempts, message(row)?) }));
    }
    Ok((all, cut || full))
}
