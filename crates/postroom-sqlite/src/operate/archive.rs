//! Messages that leave the outbox for an archive, and come back.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use postroom::{
    ArchiveState, ArchivedMessage, Deed, Expired, MessageId, Part, Restored, Retention, Segment, SegmentId, StoreError,
    Sweep, Turn,
};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};
use uuid::Uuid;

use crate::connect::{NOW, store_error};
use crate::operate::dead::audit;
use crate::operate::retain::{expired, not_too_short, passed};
use crate::text::Text;

/// A segment is left to its process for so long. Two that are at it at once do the same work twice, and no harm.
const TAKEN_MS: i64 = 60_000;
/// Rows that one step removes of what came back.
const FORGET: i64 = 2_000;
/// A message that no relay has to send: every route has passed it, and nobody gave it out again.
const FINISHED: &str = "o.seq < ?1 and not exists (
    select 1 from postroom_routes r join postroom_parked p on p.route = r.name and p.seq = o.seq)";

fn write<T>(
    connection: &mut Connection,
    what: &'static str,
    work: impl FnOnce(&Transaction<'_>) -> Result<T, rusqlite::Error>,
) -> Result<T, StoreError> {
    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(|error| store_error(what, error))?;
    let result = work(&tx).map_err(|error| store_error(what, error))?;
    tx.commit().map_err(|error| store_error(what, error))?;
    Ok(result)
}

/// What is known of the archive.
pub(crate) fn state(connection: &Connection) -> Result<ArchiveState, StoreError> {
    let sql = format!(
        "select s.outbox_id, s.archives, s.archived_segments,
                (select ({NOW} - min(g.begun_ms)) / 1000.0 from postroom_archive_segments g where not g.stored)
           from postroom_settings s"
    );
    let state = |row: &Row<'_>| {
        Ok(ArchiveState {
            outbox: Uuid::parse_str(&row.get::<_, String>(0)?).unwrap_or_default(),
            archives: row.get(1)?,
            segments: row.get::<_, i64>(2)?.unsigned_abs(),
            unfinished_seconds: row.get(3)?,
        })
    };
    connection.query_row(&sql, [], state).map_err(|error| store_error("look at the archive's segments", error))
}

/// One look for what may leave.
pub(crate) fn find_expired(
    connection: &Connection,
    retention: &Retention,
    mut sweep: Sweep,
) -> Result<(Vec<Expired>, Sweep), StoreError> {
    not_too_short(retention)?;
    if sweep.parts.first() != Some(&Part::Outbox) {
        sweep.parts.clear();
        return Ok((Vec::new(), sweep));
    }
    let (found, more) = expired(connection, retention, &mut sweep)
        .map_err(|error| store_error("look for messages to archive", error))?;
    if !more {
        sweep.next_part();
    }
    Ok((found, sweep))
}

/// Writes down what is about to leave.
pub(crate) fn begin(connection: &mut Connection, messages: &[Expired]) -> Result<Option<Segment>, StoreError> {
    let seqs: Vec<i64> = messages.iter().map(|message| message.seq).collect();
    let seqs = serde_json::json!(seqs).to_string();
    write(connection, "begin to archive", |tx| {
        let others: bool =
            tx.query_row("select exists (select 1 from postroom_archive_segments where not stored)", [], |row| {
                row.get(0)
            })?;
        if others {
            return Ok(None);
        }
        let id = Uuid::from(MessageId::new());
        let leaving = "insert into postroom_archive_leaving (segment, seq, id)
                       select ?1, o.seq, o.id from postroom_outbox o
                        where o.seq in (select value from json_each(?2))
                          and not exists (select 1 from postroom_archive_leaving a where a.seq = o.seq and a.id = o.id)";
        if tx.execute(leaving, params![id.to_string(), seqs])? == 0 {
            return Ok(None);
        }
        let segment = format!(
            "insert into postroom_archive_segments (id, begun_ms, taken_until_ms) values (?1, {NOW}, {NOW} + ?2)"
        );
        tx.execute(&segment, params![id.to_string(), TAKEN_MS])?;
        tx.execute("update postroom_settings set archives = 1", [])?;
        Ok(Some(Segment { id: id.into(), stored: false }))
    })
}

/// Takes a segment that nobody works on.
pub(crate) fn take(connection: &mut Connection) -> Result<Turn, StoreError> {
    write(connection, "go on with archiving", |tx| {
        let sql = format!(
            "update postroom_archive_segments set taken_until_ms = {NOW} + ?1
              where id = (select id from postroom_archive_segments where taken_until_ms < {NOW} order by begun_ms limit 1)
              returning id, stored"
        );
        let read = |row: &Row<'_>| Ok((row.get::<_, String>(0)?, row.get(1)?));
        let found: Option<(String, bool)> = tx.query_row(&sql, [TAKEN_MS], read).optional()?;
        if let Some((id, stored)) = found {
            return Ok(Turn::Ours(Segment { id: Uuid::parse_str(&id).unwrap_or_default().into(), stored }));
        }
        let others = "select exists (select 1 from postroom_archive_segments where not stored)";
        let others: bool = tx.query_row(others, [], |row| row.get(0))?;
        Ok(if others { Turn::Others } else { Turn::Nobodys })
    })
}

/// The messages of a segment.
pub(crate) fn messages(connection: &Connection, segment: SegmentId) -> Result<Vec<ArchivedMessage>, StoreError> {
    let read = || -> Result<Vec<ArchivedMessage>, rusqlite::Error> {
        let sql = "select o.* from postroom_archive_leaving a join postroom_outbox o on o.seq = a.seq and o.id = a.id
                    where a.segment = ?1 order by o.seq";
        connection.prepare(sql)?.query_map([segment.to_string()], archived)?.collect()
    };
    read().map_err(|error| store_error("read what is to be archived", error))
}

fn archived(row: &Row<'_>) -> Result<ArchivedMessage, rusqlite::Error> {
    let mut unreadable = BTreeMap::new();
    let mut text = |column: &'static str| -> Result<Option<String>, rusqlite::Error> {
        let Some(Text { text, whole }) = row.get(column)? else { return Ok(None) };
        if !whole {
            unreadable.insert(column.to_owned(), bytes_of(row, column)?);
        }
        Ok(Some(text))
    };
    let written_id: String = row.get("id")?;
    Ok(ArchivedMessage {
        seq: row.get("seq")?,
        // The table's check makes it 32 hexadecimal digits, however they are hyphenated.
        id: Uuid::from_u128(u128::from_str_radix(&written_id.replace('-', ""), 16).unwrap_or_default()),
        topic: text("topic")?.unwrap_or_default(),
        kind: text("type")?.unwrap_or_default(),
        payload: bytes_of(row, "payload")?,
        key: text("key")?,
        routing_key: text("routing_key")?,
        content_type: text("content_type")?.unwrap_or_default(),
        headers: text("headers")?,
        tenant_id: text("tenant_id")?,
        aggregate_type: text("aggregate_type")?,
        aggregate_id: text("aggregate_id")?,
        aggregate_version: row.get("aggregate_version")?,
        occurred_us: row.get::<_, i64>("occurred_ms")?.saturating_mul(1000),
        unreadable,
    })
}

fn bytes_of(row: &Row<'_>, column: &str) -> Result<Bytes, rusqlite::Error> {
    Ok(match row.get_ref(column)? {
        ValueRef::Blob(bytes) | ValueRef::Text(bytes) => Bytes::copy_from_slice(bytes),
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => Bytes::new(),
    })
}

/// Removes the messages of a segment that the archive has.
pub(crate) fn end(connection: &mut Connection, segment: SegmentId) -> Result<u64, StoreError> {
    write(connection, "remove what is archived", |tx| {
        let segment = segment.to_string();
        if tx.execute("update postroom_archive_segments set stored = 1 where id = ?1 and not stored", [&segment])? > 0 {
            tx.execute("update postroom_settings set archived_segments = archived_segments + 1", [])?;
        }
        let sql = format!(
            "delete from postroom_outbox as o
              where o.seq in (select a.seq from postroom_archive_leaving a where a.segment = ?2)
                and exists (select 1 from postroom_archive_leaving a where a.segment = ?2 and a.seq = o.seq and a.id = o.id) and {FINISHED}"
        );
        let removed = match passed(tx)? {
            Some(passed) => tx.execute(&sql, params![passed, segment])?,
            None => 0,
        };
        tx.execute(
            "delete from postroom_archive_leaving
              where segment = ?1
                and not exists (select 1 from postroom_outbox o where o.seq = postroom_archive_leaving.seq and o.id = postroom_archive_leaving.id)",
            [&segment],
        )?;
        tx.execute(
            "delete from postroom_archive_segments
              where id = ?1 and not exists (select 1 from postroom_archive_leaving a where a.segment = ?1)",
            [&segment],
        )?;
        Ok(removed as u64)
    })
}

/// Removes what came back and whose time is over.
pub(crate) fn forget_restored(connection: &mut Connection) -> Result<u64, StoreError> {
    let due = format!("select exists (select 1 from postroom_archive_restored where stays_until_ms < {NOW})");
    let what = "remove what came back from the archive";
    let any: bool = connection.query_row(&due, [], |row| row.get(0)).map_err(|error| store_error(what, error))?;
    if !any {
        return Ok(0);
    }
    write(connection, what, |tx| {
        let Some(passed) = passed(tx)? else { return Ok(0) };
        let due = format!(
            "select a.seq, a.id from postroom_archive_restored a
              where a.stays_until_ms < {NOW}
                and not exists (select 1 from postroom_outbox o where o.seq = a.seq and o.id = a.id and not ({FINISHED})) limit ?2"
        );
        let mut statement = tx.prepare(&due)?;
        let due: Vec<(i64, String)> = statement
            .query_map(params![passed, FORGET], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<Result<_, _>>()?;
        for (seq, id) in &due {
            tx.execute("delete from postroom_outbox where seq = ?1 and id = ?2", params![seq, id])?;
            tx.execute("delete from postroom_archive_restored where seq = ?1 and id = ?2", params![seq, id])?;
        }
        Ok(due.len() as u64)
    })
}

/// Puts messages back into their places.
pub(crate) fn restore(
    connection: &mut Connection,
    messages: &[ArchivedMessage],
    stays: Duration,
    deed: &Deed,
) -> Result<Restored, StoreError> {
    write(connection, "put archived messages back; nothing was changed", |tx| {
        let stays_ms = i64::try_from(stays.as_millis()).unwrap_or(i64::MAX / 4);
        // Behind the position, and not at it: see `passed`. A store without a route has passed everything it ever wrote.
        let behind: Option<i64> = tx.query_row("select min(position_seq) from postroom_lanes", [], |row| row.get(0))?;
        let drawn: i64 = tx.query_row(
            "select coalesce((select max(seq) from sqlite_sequence where name = 'postroom_outbox'), 0)",
            [],
            |row| row.get(0),
        )?;
        let mut restored = Restored::default();
        for message in messages {
            let id = message.id.to_string();
            let here = "select seq from postroom_outbox where replace(lower(id), '-', '') = ?1";
            let here: Option<i64> =
                tx.query_row(here, [message.id.simple().to_string()], |row| row.get(0)).optional()?;
            if let Some(seq) = here {
                restored.present += 1;
                let longer = format!(
                    "update postroom_archive_restored set stays_until_ms = max(stays_until_ms, {NOW} + ?3) where seq = ?1 and id = ?2"
                );
                tx.execute(&longer, params![seq, id, stays_ms])?;
                continue;
            }
            if message.seq > drawn || behind.is_some_and(|behind| message.seq > behind) {
                restored.ahead += 1;
                continue;
            }
            let put = tx.execute(
                "insert or ignore into postroom_outbox (seq, id, topic, type, payload, key, routing_key, content_type, headers, tenant_id,
                                                        aggregate_type, aggregate_id, aggregate_version, occurred_ms)
                 values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)",
                params![
                    message.seq,
                    id,
                    message.topic,
                    message.kind,
                    message.payload.as_ref(),
                    message.key,
                    message.routing_key,
                    message.content_type,
                    message.headers,
                    message.tenant_id,
                    message.aggregate_type,
                    message.aggregate_id,
                    message.aggregate_version,
                    message.occurred_us.div_euclid(1000)
                ],
            )?;
            if put == 0 {
                restored.taken += 1;
                continue;
            }
            let note = format!(
                "insert or replace into postroom_archive_restored (seq, id, stays_until_ms) values (?1, ?2, {NOW} + ?3)"
            );
            tx.execute(&note, params![message.seq, id, stays_ms])?;
            restored.restored += 1;
            restored.ids.push(MessageId::from(message.id));
        }
        if !restored.ids.is_empty() {
            let ids: Vec<String> = restored.ids.iter().map(MessageId::to_string).collect();
            let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
            let conditions = format!("{{\"stays_seconds\":{}}}", stays.as_secs());
            audit(tx, deed, "archive.restore", &conditions, &ids)?;
        }
        Ok(restored)
    })
}
