//! What operators see of keys that wait, and what they do about them.

use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Row, params};
use postroom::{Deed, KeyDeed, Side, StoreError, WaitingKey, WaitsFor};

use crate::desk::{Failed, begin};
use crate::log::get;
use crate::log::record::promote;
use crate::operate::audit::audit;
use crate::operate::dead::lock_lanes;

/// Microseconds; an age that no clock reaches is cut off.
pub(super) fn ago(age: Duration) -> i64 {
    // A thousand years: more than that is no date any more.
    i64::try_from(age.as_micros()).unwrap_or(i64::MAX).min(31_557_600_000_000_000)
}

/// Keys that wait, longest first, at most `limit`.
pub(crate) async fn waiting_keys(
    conn: &mut Conn,
    side: Side,
    route: Option<&str>,
    limit: i64,
) -> Result<Vec<WaitingKey>, Failed> {
    // A parked row does not note when it was parked; the message's own time stands for it.
    let out = "with waiting as (
             select route, ordering_key, count(*) as messages, min(seq) as first from postroom_parked
              where state <> 'scheduled' and ordering_key is not null and (:route is null or route = :route)
              group by route, ordering_key),
         blocked as (
             select route, ordering_key, min(blocked_at) as since, max(seq) as seq, max(reason) as reason
               from postroom_blocked_keys where :route is null or route = :route group by route, ordering_key),
         waits as (select route, ordering_key from waiting union select route, ordering_key from blocked)
         select k.route, k.ordering_key,
                case when b.route is null then 'retry' when b.seq > 0 then 'dead' else 'parked' end as waits_for,
                coalesce((select d.id from postroom_dead_letters d where d.route = b.route and d.seq = b.seq limit 1), h.id) as head,
                coalesce(w.messages, 0) as messages,
                coalesce((select d.attempts from postroom_dead_letters d where d.route = b.route and d.seq = b.seq limit 1), h.attempts, 0) as attempts,
                timestampdiff(microsecond, coalesce(b.since, h.occurred_at), utc_timestamp(6)) / 1e6 as since,
                if(b.route is null, greatest(timestampdiff(microsecond, utc_timestamp(6), h.due_at), 0) / 1e6, null) as retry_in,
                coalesce(b.reason, h.last_error) as reason
           from waits k
           left join waiting w on w.route = k.route and w.ordering_key = k.ordering_key
           left join blocked b on b.route = k.route and b.ordering_key = k.ordering_key
           left join postroom_parked h on h.route = w.route and h.seq = w.first and h.ordering_key = w.ordering_key
          order by since desc limit :limit";
    let inside = "select h.consumer as route, h.ordering_key, 'retry' as waits_for, h.id as head, count(*) as messages, h.attempts,
                timestampdiff(microsecond, min(coalesce(m.received_at, m.occurred_at)), utc_timestamp(6)) / 1e6 as since,
                greatest(timestampdiff(microsecond, utc_timestamp(6), h.due_at), 0) / 1e6 as retry_in, h.last_error as reason
           from postroom_inbox_messages h
           join postroom_inbox_messages m
             on m.consumer = h.consumer and m.key_hash = h.key_hash and m.ordering_key = h.ordering_key and m.state in ('ready', 'claimed')
          where h.state = 'ready' and h.attempts > 0 and h.ordering_key is not null and (:route is null or h.consumer = :route)
          group by h.seq, h.consumer, h.ordering_key, h.id, h.attempts, h.due_at, h.last_error order by since desc limit :limit";
    let sql = match side {
        Side::Out => out,
        Side::In => inside,
    };
    let rows: Vec<Row> = conn.exec(sql, params! { "route" => route, "limit" => limit.max(0) }).await?;
    Ok(rows.into_iter().map(waiting).collect::<Result<_, _>>()?)
}

fn waiting(mut row: Row) -> Result<WaitingKey, Error> {
    let row = &mut row;
    Ok(WaitingKey {
        route: get(row, "route")?,
        key: get(row, "ordering_key")?,
        waits_for: super::word(row, "waits_for", WaitsFor::of)?,
        head: get(row, "head")?,
        messages: get(row, "messages")?,
        attempts: get(row, "attempts")?,
        since_seconds: get(row, "since")?,
        retry_in_seconds: get(row, "retry_in")?,
        reason: get(row, "reason")?,
    })
}

/// Parks, unparks or skips a key of a route, with an audit row in the same transaction. False: there was nothing to do.
pub(crate) async fn act_on_key(
    conn: &mut Conn,
    route: &str,
    key: &str,
    what: KeyDeed,
    deed: &Deed,
) -> Result<bool, Failed> {
    let mut tx = begin(conn).await?;
    let known: Option<i64> = tx.exec_first("select 1 from postroom_routes where name = ?", (route,)).await?;
    if known.is_none() {
        let source = format!("there is no route {route:?}; `postroom status` lists them").into();
        return Err(StoreError::Refused { what: "act on a key", source }.into());
    }
    let lane: Option<i64> = tx.exec_first("select crc32(?) % lanes from postroom_settings", (key,)).await?;
    lock_lanes(&mut tx, route, &lane.into_iter().collect()).await?;
    let mut ids: Vec<String> = Vec::new();
    let changed = match what {
        KeyDeed::Park => {
            let sql = "insert into postroom_blocked_keys (route, ordering_key, seq, reason) values (?, ?, 0, ?)
                       on duplicate key update seq = seq";
            tx.exec_drop(sql, (route, key, &deed.reason)).await?;
            tx.affected_rows()
        }
        KeyDeed::Unpark => {
            let sql = "delete from postroom_blocked_keys where route = ? and ordering_key = ? and seq = 0";
            tx.exec_drop(sql, (route, key)).await?;
            tx.affected_rows()
        }
        KeyDeed::Skip => {
            let sql = "select d.id from postroom_blocked_keys b join postroom_dead_letters d on d.route = b.route and d.seq = b.seq
                        where b.route = ? and b.ordering_key = ? and b.seq > 0";
            ids = tx.exec(sql, (route, key)).await?;
            let sql = "delete from postroom_blocked_keys where route = ? and ordering_key = ? and seq > 0";
            tx.exec_drop(sql, (route, key)).await?;
            tx.affected_rows()
        }
    };
    if changed == 0 {
        return Ok(false);
    }
    promote(&mut tx, route, &[key]).await?;
    let conditions = serde_json::json!({ "route": route, "key": key }).to_string();
    audit(&mut tx, deed, what.action(), &conditions, &ids).await?;
    tx.commit().await?;
    Ok(true)
}
