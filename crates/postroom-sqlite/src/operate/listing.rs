//! Messages as an operator looks them up, and the test message that an operator sends.

use postroom::{
    Deed, Listed, ListedMessage, ListedPlace, Message, MessageFilter, MessageId, StoreError, StoredMessage,
    headers_from_json,
};
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};

use crate::connect::{NOW, store_error, word};
use crate::operate::dead::audit;
use crate::operate::status::TAKES;
use crate::outbox::enqueue;
use crate::text::{text, text_or_null};

/// So many rows of the outbox are looked at for a page.
const ROWS_MAX: i64 = 10_000;

/// Messages by filter, newest first.
pub(crate) fn messages(connection: &Connection, filter: &MessageFilter, limit: i64) -> Result<Listed, StoreError> {
    let failed = |error| store_error("look for messages", error);
    let MessageFilter { route, topic, key, place, newer_than, older_than, after } = filter;
    let upto = after.as_ref().map_or(i64::MAX, |after| after.seq);
    let of_outbox =
        place.is_none_or(|place| matches!(place, ListedPlace::Waiting | ListedPlace::Done | ListedPlace::Unrouted));
    // To this row the page reads; below it, nothing of the other tables is shown either.
    let sql = "select seq from postroom_outbox where seq <= ?1 order by seq desc limit 1 offset ?2";
    let read_to: Option<i64> = match of_outbox {
        true => connection.query_row(sql, [upto, ROWS_MAX - 1], |row| row.get(0)).optional().map_err(failed)?,
        false => None,
    };
    let sql = format!(
        "with looked as (select seq, id, topic, type, coalesce(key, aggregate_id) as key, occurred_ms
                           from postroom_outbox where ?13 and seq between ?7 and ?8)
         select * from (
             select r.name as route, o.id, case when o.seq <= l.position_seq then 'done' else 'waiting' end as state,
                    o.topic, o.type, o.key, 0 as attempts, o.occurred_ms, o.seq
               from looked o join postroom_routes r join postroom_lanes l on l.route = r.name
              where {TAKES}
                and not exists (select 1 from postroom_parked p where p.route = r.name and p.seq = o.seq and p.id = o.id)
                and not exists (select 1 from postroom_dead_letters d where d.route = r.name and d.seq = o.seq and d.id = o.id)
             union all
             select null, o.id, 'unrouted', o.topic, o.type, o.key, 0, o.occurred_ms, o.seq from looked o
              where not exists (select 1 from postroom_routes r where {TAKES})
             union all
             select route, id, state, topic, type, coalesce(key, aggregate_id), attempts, occurred_ms, seq from postroom_parked
              where seq between ?7 and ?8
             union all
             select route, id, 'dead', topic, type, coalesce(key, aggregate_id), attempts, occurred_ms, seq from postroom_dead_letters
              where seq between ?7 and ?8) m
          where (?1 is null or m.route = ?1) and (?2 is null or m.topic = ?2) and (?3 is null or m.key = ?3)
            and (?4 is null or m.state = ?4)
            and (?5 is null or m.occurred_ms >= {NOW} - ?5) and (?6 is null or m.occurred_ms <= {NOW} - ?6)
            and (?9 or m.seq < ?8 or (m.seq = ?8 and (m.id < ?10 or (m.id = ?10 and coalesce(m.route, '') > ?11))))
          order by m.seq desc, m.id desc, coalesce(m.route, '') limit ?12"
    );
    let millis = |age: std::time::Duration| i64::try_from(age.as_millis()).unwrap_or(i64::MAX / 4);
    let entry = after.as_ref().and_then(|after| after.entry.as_ref());
    let parameters = params![
        route,
        topic,
        key,
        place.map(ListedPlace::as_str),
        newer_than.map(millis),
        older_than.map(millis),
        read_to.unwrap_or(i64::MIN),
        upto,
        after.is_none(),
        entry.map(|entry| entry.id.as_str()),
        entry.map(|entry| entry.route.as_deref().unwrap_or_default()),
        limit.saturating_add(1),
        of_outbox,
    ];
    let clock: i64 = connection.query_row(&format!("select {NOW}"), [], |row| row.get(0)).map_err(failed)?;
    let read = |row: &Row<'_>| {
        let message = ListedMessage {
            route: row.get(0)?,
            id: row.get(1)?,
            state: word(row, 2, ListedPlace::of)?,
            topic: text(row, 3)?,
            kind: text(row, 4)?,
            key: text_or_null(row, 5)?,
            attempts: row.get(6)?,
            age_seconds: (clock - row.get::<_, i64>(7)?) as f64 / 1000.0,
        };
        Ok((message, row.get(8)?))
    };
    let found: Vec<(ListedMessage, i64)> = connection
        .prepare(&sql)
        .and_then(|mut statement| statement.query_map(parameters, read)?.collect())
        .map_err(failed)?;
    Ok(Listed::page(found, limit, read_to))
}

/// One message with its payload, from the first table that has it.
pub(crate) fn message(connection: &Connection, id: MessageId) -> Result<Option<StoredMessage>, StoreError> {
    let columns = "id, topic, type, key, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id, \
                   aggregate_version, occurred_ms, cast(payload as blob)";
    let tables = ["outbox", "dead_letters", "dead_consume", "parked", "inbox_messages"].map(|table| {
        format!("select '{table}', {columns} from postroom_{table} where replace(lower(id), '-', '') = ?1")
    });
    let sql = format!("{} limit 1", tables.join(" union all "));
    let read = |row: &Row<'_>| {
        let occurred: Option<i64> = row.get(12)?;
        let stored = StoredMessage {
            found_in: row.get(0)?,
            id: row.get(1)?,
            topic: text(row, 2)?,
            kind: text(row, 3)?,
            key: text_or_null(row, 4)?,
            routing_key: text_or_null(row, 5)?,
            content_type: text(row, 6)?,
            headers: headers_from_json(text_or_null(row, 7)?.as_deref()),
            tenant_id: text_or_null(row, 8)?,
            aggregate_type: text_or_null(row, 9)?,
            aggregate_id: text_or_null(row, 10)?,
            aggregate_version: row.get(11)?,
            age_seconds: 0.0,
            payload: row.get(13)?,
        };
        Ok((stored, occurred))
    };
    let failed = |error| store_error("look for a message", error);
    let id = id.to_string().replace('-', "");
    let found = connection.query_row(&sql, [id], read).optional().map_err(failed)?;
    let clock: i64 = connection.query_row(&format!("select {NOW}"), [], |row| row.get(0)).map_err(failed)?;
    Ok(found.map(|(stored, occurred)| {
        let age_seconds = occurred.map_or(0.0, |occurred| (clock - occurred) as f64 / 1000.0);
        StoredMessage { age_seconds, ..stored }
    }))
}

/// Writes one message, in a transaction of its own.
pub(crate) fn send(connection: &mut Connection, message: &Message) -> Result<(), StoreError> {
    const WHAT: &str = "write the message; nothing was written";
    let failed = |error| store_error(WHAT, error);
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    enqueue(&tx, std::slice::from_ref(message))
        .map_err(|error| StoreError::Refused { what: WHAT, source: error.into() })?;
    tx.commit().map_err(failed)
}

/// Leaves an audit row about somebody who looks at a payload.
pub(crate) fn note_payload_read(connection: &mut Connection, id: MessageId, deed: &Deed) -> Result<(), StoreError> {
    let mut note = || -> Result<(), rusqlite::Error> {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        audit(&tx, deed, "payload.read", "{}", &[&id.to_string()])?;
        tx.commit()
    };
    note().map_err(|error| store_error("note that a payload is read; it was not shown", error))
}
