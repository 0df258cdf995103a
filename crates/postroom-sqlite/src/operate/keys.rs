//! What operators see of keys that wait, and what they do about them.

use postroom::{Deed, KeyDeed, Side, StoreError, WaitingKey, WaitsFor};
use rusqlite::{Connection, Row, TransactionBehavior, params};

use crate::connect::NOW;
use crate::connect::{store_error, word};
use crate::log::record::promote;
use crate::operate::dead::audit;
use crate::text::{text, text_or_null};

/// Keys that wait, longest first, at most `limit`.
pub(crate) fn waiting_keys(
    connection: &Connection,
    side: Side,
    route: Option<&str>,
    limit: i64,
) -> Result<Vec<WaitingKey>, StoreError> {
    if side == Side::In {
        return waiting_keys_in(connection, route, limit);
    }
    // A parked row does not note when it was parked; the message's own time stands for it.
    let sql = format!(
        "with waiting as (
             select route, ordering_key, count(*) as messages, min(seq) as first from postroom_parked
              where state <> 'scheduled' and ordering_key is not null and (?1 is null or route = ?1)
              group by route, ordering_key),
         blocked as (
             select route, ordering_key, min(blocked_ms) as since, max(seq) as seq, max(reason) as reason
               from postroom_blocked_keys where ?1 is null or route = ?1 group by route, ordering_key),
         keys as (select route, ordering_key from waiting union select route, ordering_key from blocked)
         select k.route, k.ordering_key,
                case when b.route is null then 'retry' when b.seq > 0 then 'dead' else 'parked' end,
                coalesce((select d.id from postroom_dead_letters d where d.route = b.route and d.seq = b.seq), h.id),
                coalesce(w.messages, 0),
                coalesce((select d.attempts from postroom_dead_letters d where d.route = b.route and d.seq = b.seq), h.attempts, 0),
                ({NOW} - coalesce(b.since, h.occurred_ms)) / 1000.0,
                case when b.route is null then max(h.due_ms - {NOW}, 0) / 1000.0 end, coalesce(b.reason, h.last_error)
           from keys k
           left join waiting w on w.route = k.route and w.ordering_key = k.ordering_key
           left join blocked b on b.route = k.route and b.ordering_key = k.ordering_key
           left join postroom_parked h on h.route = w.route and h.seq = w.first
          order by 7 desc limit ?2"
    );
    let read = |row: &Row<'_>| {
        Ok(WaitingKey {
            route: row.get(0)?,
            key: text(row, 1)?,
            waits_for: word(row, 2, WaitsFor::of)?,
            head: text_or_null(row, 3)?,
            messages: row.get(4)?,
            attempts: row.get(5)?,
            since_seconds: row.get(6)?,
            retry_in_seconds: row.get(7)?,
            reason: text_or_null(row, 8)?,
        })
    };
    connection
        .prepare(&sql)
        .and_then(|mut statement| statement.query_map(params![route, limit], read)?.collect())
        .map_err(|error| store_error("read the waiting keys", error))
}

/// Keys of which messages wait in inboxes because one failed.
fn waiting_keys_in(connection: &Connection, consumer: Option<&str>, limit: i64) -> Result<Vec<WaitingKey>, StoreError> {
    let sql = format!(
        "select h.consumer, h.ordering_key, h.id, count(*), h.attempts,
                ({NOW} - min(coalesce(m.received_ms, m.occurred_ms, {NOW}))) / 1000.0, max(h.due_ms - {NOW}, 0) / 1000.0, h.last_error
           from postroom_inbox_messages h
           join postroom_inbox_messages m
             on m.consumer = h.consumer and m.ordering_key = h.ordering_key and m.state in ('ready', 'claimed')
          where h.state = 'ready' and h.attempts > 0 and h.ordering_key is not null and (?1 is null or h.consumer = ?1)
          group by h.consumer, h.ordering_key, h.id order by 6 desc limit ?2"
    );
    let read = |row: &Row<'_>| {
        Ok(WaitingKey {
            route: row.get(0)?,
            key: text(row, 1)?,
            waits_for: WaitsFor::Retry,
            head: text_or_null(row, 2)?,
            messages: row.get(3)?,
            attempts: row.get(4)?,
            since_seconds: row.get(5)?,
            retry_in_seconds: row.get(6)?,
            reason: text_or_null(row, 7)?,
        })
    };
    connection
        .prepare(&sql)
        .and_then(|mut statement| statement.query_map(params![consumer, limit], read)?.collect())
        .map_err(|error| store_error("read the waiting keys", error))
}

/// Parks, unparks or skips a key of a route, with an audit row in the same transaction. False: there was nothing to do.
pub(crate) fn act_on_key(
    connection: &mut Connection,
    route: &str,
    key: &str,
    what: KeyDeed,
    deed: &Deed,
) -> Result<bool, StoreError> {
    let failed = |error| store_error("act on a key; nothing was changed", error);
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let known: bool = tx
        .query_row("select exists (select 1 from postroom_routes where name = ?1)", [route], |row| row.get(0))
        .map_err(failed)?;
    if !known {
        return Err(StoreError::Refused {
            what: "act on a key",
            source: format!("there is no route {route:?}; `postroom status` lists them").into(),
        });
    }
    let mut ids: Vec<String> = Vec::new();
    let changed = match what {
        KeyDeed::Park => {
            let sql = "insert into postroom_blocked_keys (route, ordering_key, seq, reason) values (?1, ?2, 0, ?3)
                       on conflict do nothing";
            tx.execute(sql, params![route, key, deed.reason])
        }
        KeyDeed::Unpark => {
            let sql = "delete from postroom_blocked_keys where route = ?1 and ordering_key = ?2 and seq = 0";
            tx.execute(sql, params![route, key])
        }
        KeyDeed::Skip => {
            let sql = "select d.id from postroom_blocked_keys b join postroom_dead_letters d on d.route = b.route and d.seq = b.seq
                        where b.route = ?1 and b.ordering_key = ?2 and b.seq > 0";
            ids = tx
                .prepare(sql)
                .and_then(|mut statement| statement.query_map([route, key], |row| row.get(0))?.collect())
                .map_err(failed)?;
            let sql = "delete from postroom_blocked_keys where route = ?1 and ordering_key = ?2 and seq > 0";
            tx.execute(sql, params![route, key])
        }
    };
    if changed.map_err(failed)? == 0 {
        return Ok(false);
    }
    promote(&tx, route, key).map_err(failed)?;
    let conditions = serde_json::json!({ "route": route, "key": key }).to_string();
    audit(&tx, deed, what.action(), &conditions, &ids.iter().map(String::as_str).collect::<Vec<_>>())
        .map_err(failed)?;
    tx.commit().map_err(failed)?;
    Ok(true)
}
