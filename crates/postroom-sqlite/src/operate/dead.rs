//! What operators do about dead letters. Every deed and the audit row about it are one transaction.

use postroom::{Cause, DeadCursor, DeadDeed, DeadFilter, DeadLetter, Deed, Side, StoreError, headers_from_json};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};

use crate::connect::NOW;
use crate::connect::{store_error, word};
use crate::log::record::{COPIED, promote};
use crate::text::{Text, text, text_or_null};

/// Dead letters by filter, oldest first, at most `limit`.
pub(crate) fn dead_letters(
    connection: &Connection,
    after: Option<&DeadCursor>,
    side: Side,
    filter: &DeadFilter,
    limit: i64,
) -> Result<Vec<DeadLetter>, StoreError> {
    chosen(connection, after, side, filter, limit).map_err(|error| store_error("read the dead letters", error))
}

/// The payload of one dead letter.
pub(crate) fn dead_payload(
    connection: &Connection,
    side: Side,
    route: &str,
    seq: i64,
) -> Result<Option<Vec<u8>>, StoreError> {
    let sql = match side {
        Side::Out => "select cast(payload as blob) from postroom_dead_letters where route = ?1 and seq = ?2",
        Side::In => "select cast(payload as blob) from postroom_dead_consume where consumer = ?1 and seq = ?2",
    };
    connection
        .query_row(sql, params![route, seq], |row| row.get(0))
        .optional()
        .map_err(|error| store_error("read a dead letter", error))
}

/// Gives dead letters back to their relay or consumer, or deletes them. Returns those that it was done to: a letter that died a
/// moment ago, and that the position has not passed, is not discarded, because a crash would bring it back and send it.
pub(crate) fn act_on_dead(
    connection: &mut Connection,
    what: DeadDeed,
    side: Side,
    filter: &DeadFilter,
    limit: i64,
    deed: &Deed,
) -> Result<Vec<DeadLetter>, StoreError> {
    let done = match side {
        Side::Out => act(connection, what, filter, limit, deed),
        Side::In => act_in(connection, what, filter, limit, deed),
    };
    done.map_err(|error| store_error("act on dead letters; nothing was changed", error))
}

fn act_in(
    connection: &mut Connection,
    what: DeadDeed,
    filter: &DeadFilter,
    limit: i64,
    deed: &Deed,
) -> Result<Vec<DeadLetter>, rusqlite::Error> {
    const KEPT: &str = "history, topic, type, payload, key, routing_key, content_type, headers, tenant_id, \
                        aggregate_type, aggregate_id, aggregate_version, occurred_ms";
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let letters = chosen(&tx, None, Side::In, filter, limit)?;
    if letters.is_empty() {
        return Ok(letters);
    }
    for DeadLetter { route, id, .. } in &letters {
        if what == DeadDeed::Retry {
            let sql = format!(
                "insert into postroom_inbox_messages (consumer, id, state, due_ms, waits_since_ms, received_ms, ordering_key, last_error, {KEPT})
                 select consumer, id, 'ready', {NOW}, {NOW}, {NOW}, ordering_key, error, {KEPT}
                   from postroom_dead_consume where consumer = ?1 and id = ?2
                     on conflict (consumer, id) do nothing"
            );
            tx.execute(&sql, params![route, id])?;
        }
        tx.execute("delete from postroom_dead_consume where consumer = ?1 and id = ?2", params![route, id])?;
    }
    let ids: Vec<&str> = letters.iter().map(|letter| letter.id.as_str()).collect();
    audit(&tx, deed, what.action(Side::In), &serde_json::to_string(filter).unwrap_or_default(), &ids)?;
    tx.commit()?;
    Ok(letters)
}

fn act(
    connection: &mut Connection,
    what: DeadDeed,
    filter: &DeadFilter,
    limit: i64,
    deed: &Deed,
) -> Result<Vec<DeadLetter>, rusqlite::Error> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut letters = chosen(&tx, None, Side::Out, filter, limit)?;
    if what == DeadDeed::Discard {
        // One that the position has not passed would be read and sent again after a crash.
        let sql = "select position_seq >= ?2 from postroom_lanes where route = ?1 and lane = 0";
        let mut passed = tx.prepare(sql)?;
        let mut kept = Vec::with_capacity(letters.len());
        for letter in letters {
            if passed.query_row(params![letter.route, letter.seq], |row| row.get(0)).optional()?.unwrap_or(true) {
                kept.push(letter);
            }
        }
        letters = kept;
    }
    if letters.is_empty() {
        return Ok(letters);
    }
    for DeadLetter { route, seq, key, .. } in &letters {
        // A key that is not UTF-8 can be given to no statement: its messages are tried again without their order.
        let sql = "select coalesce(key, aggregate_id) from postroom_dead_letters where route = ?1 and seq = ?2";
        let stored: Option<Text> = tx.query_row(sql, params![route, seq], |row| row.get(0))?;
        let key = key.as_ref().filter(|_| stored.is_some_and(|key| key.whole));
        if what == DeadDeed::Retry {
            let sql = format!(
                "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_ms, waits_since_ms, last_error, history, {COPIED})
                 select route, seq, 0, coalesce(key, aggregate_id),
                        case when ?3 is null then 'retry' else 'queued' end, 0, {NOW}, {NOW}, error, history, {COPIED}
                   from postroom_dead_letters where route = ?1 and seq = ?2
                     on conflict (route, seq) do nothing"
            );
            tx.execute(&sql, params![route, seq, key])?;
        }
        tx.execute("delete from postroom_dead_letters where route = ?1 and seq = ?2", params![route, seq])?;
        tx.execute("delete from postroom_blocked_keys where route = ?1 and seq = ?2", params![route, seq])?;
        if let (Some(key), DeadDeed::Retry) = (key, what) {
            promote(&tx, route, key)?;
        }
    }
    let ids: Vec<&str> = letters.iter().map(|letter| letter.id.as_str()).collect();
    audit(&tx, deed, what.action(Side::Out), &serde_json::to_string(filter).unwrap_or_default(), &ids)?;
    tx.commit()?;
    Ok(letters)
}

/// Writes what an operator does, in the transaction that does it.
pub(crate) fn audit(
    tx: &Transaction<'_>,
    deed: &Deed,
    action: &str,
    conditions: &str,
    ids: &[&str],
) -> Result<(), rusqlite::Error> {
    let ids = serde_json::to_string(ids).unwrap_or_default();
    let sql = "insert into postroom_audit (actor, action, reason, filter, message_ids) values (?1, ?2, ?3, ?4, ?5)";
    tx.execute(sql, params![deed.actor, action, deed.reason, conditions, ids]).map(drop)
}

fn chosen(
    connection: &Connection,
    after: Option<&DeadCursor>,
    side: Side,
    filter: &DeadFilter,
    limit: i64,
) -> Result<Vec<DeadLetter>, rusqlite::Error> {
    let (table, route) = match side {
        Side::Out => ("postroom_dead_letters", "route"),
        Side::In => ("postroom_dead_consume", "consumer"),
    };
    let sql = format!(
        "select d.{route}, d.seq, d.id, d.topic, d.type, coalesce(d.key, d.aggregate_id), d.tenant_id, d.aggregate_id,
                d.attempts, d.cause, d.error, ({NOW} - d.died_ms) / 1000.0, length(cast(d.payload as blob)), d.headers, d.history
           from {table} d
          where (?1 is null or d.{route} = ?1) and (?2 is null or replace(lower(d.id), '-', '') = replace(?2, '-', '')) and (?3 is null or d.topic = ?3)
            and (?4 is null or d.type = ?4) and (?5 is null or d.tenant_id = ?5) and (?6 is null or d.aggregate_id = ?6)
            and (?7 is null or instr(d.error, ?7) > 0)
            and (?8 is null or d.died_ms >= {NOW} - ?8) and (?9 is null or d.died_ms <= {NOW} - ?9)
            and (?11 is null or (d.{route}, d.seq) > (?11, ?12))
          order by d.{route}, d.seq limit ?10"
    );
    let millis = |age: std::time::Duration| i64::try_from(age.as_millis()).unwrap_or(i64::MAX / 4);
    let parameters = params![
        filter.route,
        filter.id.map(|id| id.to_string()),
        filter.topic,
        filter.kind,
        filter.tenant_id,
        filter.aggregate_id,
        filter.error,
        filter.newer_than.map(millis),
        filter.older_than.map(millis),
        limit,
        after.map(|after| after.route.as_str()),
        after.map(|after| after.seq),
    ];
    connection.prepare(&sql)?.query_map(parameters, letter)?.collect()
}

fn letter(row: &Row<'_>) -> Result<DeadLetter, rusqlite::Error> {
    Ok(DeadLetter {
        route: row.get(0)?,
        seq: row.get(1)?,
        id: text(row, 2)?,
        topic: text(row, 3)?,
        kind: text(row, 4)?,
        key: text_or_null(row, 5)?,
        tenant_id: text_or_null(row, 6)?,
        aggregate_id: text_or_null(row, 7)?,
        attempts: row.get(8)?,
        cause: word(row, 9, Cause::of)?,
        error: text(row, 10)?,
        died_seconds_ago: row.get(11)?,
        payload_bytes: row.get(12)?,
        headers: headers_from_json(text_or_null(row, 13)?.as_deref()),
        history: serde_json::from_str(&text(row, 14)?).unwrap_or_default(),
        lane: 0,
    })
}
