//! Messages that leave the outbox for an archive, and come back.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Row, params};
use postroom::{
    ArchiveState, ArchivedMessage, Deed, Expired, MessageId, Part, Restored, Retention, Segment, SegmentId, Sweep, Turn,
};
use uuid::Uuid;

use crate::desk::{Failed, begin as begin_tx};
use crate::log::{get, json};
use crate::operate::audit::audit;
use crate::operate::retain::{PASSED, expired, not_too_short, remove};
use crate::operate::uuid;

/// A segment is left to its process for so long. Two that are at it at once do the same work twice, and no harm.
const TAKEN_SECONDS: i64 = 60;
/// Rows that one step removes of what came back.
const FORGET: i64 = 2_000;
/// A message `o` that a relay has yet to send: a route has not passed it, or somebody gave it out again.
const UNFINISHED: &str = "(o.place is null
    or exists (select 1 from postroom_routes r join postroom_parked p on p.route = r.name and p.seq = o.seq and p.id = o.id)
    or exists (select 1 from postroom_routes r left join postroom_lanes l on l.route = r.name and l.lane = o.lane
                where o.place > coalesce(l.position, 0)))";

/// What is known of the archive.
pub(crate) async fn state(conn: &mut Conn) -> Result<ArchiveState, Failed> {
    let sql = "select s.outbox_id, s.archives, s.archived_segments,
                      (select timestampdiff(microsecond, min(g.begun_at), utc_timestamp(6)) / 1e6
                         from postroom_archive_segments g where not g.is_stored) as unfinished
                 from postroom_settings s";
    let row: Option<Row> = conn.query_first(sql).await?;
    let mut row = row.ok_or_else(|| Error::Other("postroom_settings is empty".into()))?;
    let row = &mut row;
    Ok(ArchiveState {
        outbox: uuid(&get::<String>(row, "outbox_id")?)?,
        archives: get(row, "archives")?,
        segments: get::<i64>(row, "archived_segments")?.unsigned_abs(),
        unfinished_seconds: get(row, "unfinished")?,
    })
}

/// One look for what may leave.
pub(crate) async fn find_expired(
    conn: &mut Conn,
    retention: &Retention,
    sweep: &mut Sweep,
) -> Result<Vec<Expired>, Failed> {
    not_too_short(retention)?;
    if sweep.parts.first() != Some(&Part::Outbox) {
        sweep.parts.clear();
        return Ok(Vec::new());
    }
    let (found, more) = expired(conn, retention, sweep).await?;
    if !more {
        sweep.next_part();
    }
    Ok(found)
}

/// Writes down what is about to leave.
pub(crate) async fn begin(conn: &mut Conn, messages: &[Expired]) -> Result<Option<Segment>, Failed> {
    let seqs: Vec<i64> = messages.iter().map(|message| message.seq).collect();
    let mut tx = begin_tx(conn).await?;
    // One process at a time begins a segment; and whoever removes without an archive is done, or waits.
    let _: Option<i64> = tx.query_first("select only_row from postroom_settings for update").await?;
    let others: Option<i64> =
        tx.query_first("select 1 from postroom_archive_segments where not is_stored limit 1").await?;
    if others.is_some() {
        return Ok(None);
    }
    let id = Uuid::from(MessageId::new());
    let sql = "insert into postroom_archive_leaving (segment, seq, id)
               select straight_join ?, o.seq, o.id from json_table(?, '$[*]' columns (seq bigint path '$')) n join postroom_outbox o on o.seq = n.seq
                where not exists (select 1 from postroom_archive_leaving a where a.seq = o.seq and a.id = o.id)";
    tx.exec_drop(sql, (id.to_string(), json(&seqs))).await?;
    if tx.affected_rows() == 0 {
        return Ok(None);
    }
    let sql = "insert into postroom_archive_segments (id, begun_at, taken_until)
               values (?, utc_timestamp(6), utc_timestamp(6) + interval ? second)";
    tx.exec_drop(sql, (id.to_string(), TAKEN_SECONDS)).await?;
    tx.query_drop("update postroom_settings set archives = 1").await?;
    tx.commit().await?;
    Ok(Some(Segment { id: id.into(), stored: false }))
}

/// Takes a segment that nobody works on.
pub(crate) async fn take(conn: &mut Conn) -> Result<Turn, Failed> {
    let mut tx = begin_tx(conn).await?;
    let sql = "select id, is_stored from postroom_archive_segments where taken_until < utc_timestamp(6)
                order by begun_at limit 1 for update skip locked";
    let found: Option<(String, bool)> = tx.query_first(sql).await?;
    if let Some((id, stored)) = found {
        let sql =
            "update postroom_archive_segments set taken_until = utc_timestamp(6) + interval ? second where id = ?";
        tx.exec_drop(sql, (TAKEN_SECONDS, &id)).await?;
        tx.commit().await?;
        return Ok(Turn::Ours(Segment { id: uuid(&id)?.into(), stored }));
    }
    let others: Option<i64> =
        tx.query_first("select 1 from postroom_archive_segments where not is_stored limit 1").await?;
    Ok(if others.is_some() { Turn::Others } else { Turn::Nobodys })
}

/// The messages of a segment.
pub(crate) async fn messages(conn: &mut Conn, segment: SegmentId) -> Result<Vec<ArchivedMessage>, Failed> {
    let sql = "select straight_join o.seq, o.id, o.topic, o.type, o.payload, o.`key`, o.routing_key, o.content_type, o.headers, o.tenant_id,
                      o.aggregate_type, o.aggregate_id, o.aggregate_version,
                      timestampdiff(microsecond, '1970-01-01', o.occurred_at) as occurred_us
                 from postroom_archive_leaving a join postroom_outbox o on o.seq = a.seq and o.id = a.id
                where a.segment = ? order by o.seq";
    let rows: Vec<Row> = conn.exec(sql, (segment.to_string(),)).await?;
    Ok(rows.into_iter().map(archived).collect::<Result<_, _>>()?)
}

fn archived(mut row: Row) -> Result<ArchivedMessage, Error> {
    let row = &mut row;
    Ok(ArchivedMessage {
        seq: get(row, "seq")?,
        id: uuid(&get::<String>(row, "id")?)?,
        topic: get(row, "topic")?,
        kind: get(row, "type")?,
        payload: Bytes::from(get::<Vec<u8>>(row, "payload")?),
        key: get(row, "key")?,
        routing_key: get(row, "routing_key")?,
        content_type: get(row, "content_type")?,
        headers: get(row, "headers")?,
        tenant_id: get(row, "tenant_id")?,
        aggregate_type: get(row, "aggregate_type")?,
        aggregate_id: get(row, "aggregate_id")?,
        aggregate_version: get(row, "aggregate_version")?,
        occurred_us: get(row, "occurred_us")?,
        unreadable: BTreeMap::new(),
    })
}

/// Removes the messages of a segment that the archive has.
pub(crate) async fn end(conn: &mut Conn, segment: SegmentId) -> Result<u64, Failed> {
    let segment = segment.to_string();
    let mut tx = begin_tx(conn).await?;
    let sql = "update postroom_archive_segments set is_stored = 1 where id = ? and not is_stored";
    tx.exec_drop(sql, (&segment,)).await?;
    if tx.affected_rows() > 0 {
        tx.query_drop("update postroom_settings set archived_segments = archived_segments + 1").await?;
    }
    let sql = format!(
        "select straight_join o.seq from postroom_archive_leaving a join postroom_outbox o on o.seq = a.seq and o.id = a.id
           join {PASSED} w on w.lane = o.lane and o.place <= w.passed
          where a.segment = ? and not {UNFINISHED}"
    );
    let finished: Vec<i64> = tx.exec(sql, (&segment,)).await?;
    let removed = remove(&mut tx, &finished).await?;
    let sql = "select a.seq, a.id from postroom_archive_leaving a
                where a.segment = ? and not exists (select 1 from postroom_outbox o where o.seq = a.seq and o.id = a.id)";
    let gone: Vec<(i64, String)> = tx.exec(sql, (&segment,)).await?;
    let sql = "delete a from json_table(?, '$[*]' columns (seq bigint path '$[0]', id char(36) character set ascii path '$[1]')) n
                 straight_join postroom_archive_leaving a force index (primary) on a.seq = n.seq and a.id = n.id";
    tx.exec_drop(sql, (json(&gone),)).await?;
    let sql = "delete from postroom_archive_segments
                where id = ? and not exists (select 1 from postroom_archive_leaving a where a.segment = ?)";
    tx.exec_drop(sql, (&segment, &segment)).await?;
    tx.commit().await?;
    Ok(removed)
}

/// Removes what came back and whose time is over.
pub(crate) async fn forget_restored(conn: &mut Conn) -> Result<u64, Failed> {
    let due = "select 1 from postroom_archive_restored where stays_until < utc_timestamp(6) limit 1";
    if conn.query_first::<i64, _>(due).await?.is_none() {
        return Ok(0);
    }
    let mut tx = begin_tx(conn).await?;
    let sql = format!(
        "select a.seq, a.id from postroom_archive_restored a
          where a.stays_until < utc_timestamp(6)
            and not exists (select 1 from postroom_outbox o where o.seq = a.seq and o.id = a.id and {UNFINISHED})
          order by a.seq limit ? for update"
    );
    let due: Vec<(i64, String)> = tx.exec(sql, (FORGET,)).await?;
    for table in ["outbox", "archive_restored"] {
        let sql = format!(
            "delete a from json_table(?, '$[*]' columns (seq bigint path '$[0]', id char(36) character set ascii path '$[1]')) n
               straight_join postroom_{table} a force index (primary) on a.seq = n.seq and a.id = n.id"
        );
        tx.exec_drop(sql, (json(&due),)).await?;
    }
    tx.commit().await?;
    Ok(due.len() as u64)
}

/// The seq that the next message gets.
async fn next_seq(conn: &mut Conn) -> Result<i64, Error> {
    // MySQL remembers for a day what it found here; MariaDB does not know the variable.
    let _ = conn.query_drop("set session information_schema_stats_expiry = 0").await;
    let sql = "select cast(coalesce(auto_increment, 1) as signed) from information_schema.tables
                where table_schema = database() and table_name = 'postroom_outbox'";
    Ok(conn.query_first(sql).await?.unwrap_or(1))
}

/// Puts messages back. They have place 0, which every route has passed.
pub(crate) async fn restore(
    conn: &mut Conn,
    messages: &[ArchivedMessage],
    stays: Duration,
    deed: &Deed,
) -> Result<Restored, Failed> {
    let stays = i64::try_from(stays.as_micros()).unwrap_or(i64::MAX).min(31_557_600_000_000_000);
    let next = next_seq(conn).await?;
    conn.query_drop("set @postroom_restores = 1").await?;
    let put = put_back(conn, messages, (stays, next), deed).await;
    // The connection is used for other things afterwards.
    conn.query_drop("set @postroom_restores = null").await?;
    put
}

async fn put_back(
    conn: &mut Conn,
    messages: &[ArchivedMessage],
    (stays, next): (i64, i64),
    deed: &Deed,
) -> Result<Restored, Failed> {
    let mut tx = begin_tx(conn).await?;
    let mut restored = Restored::default();
    for message in messages {
        let id = message.id.to_string();
        let here: Option<i64> = tx.exec_first("select seq from postroom_outbox where id = ?", (&id,)).await?;
        if let Some(seq) = here {
            restored.present += 1;
            let sql = "update postroom_archive_restored set stays_until = greatest(stays_until, timestampadd(microsecond, ?, utc_timestamp(6)))
                        where seq = ? and id = ?";
            tx.exec_drop(sql, (stays, seq, &id)).await?;
            continue;
        }
        if message.seq >= next {
            restored.ahead += 1;
            continue;
        }
        let taken: Option<i64> = tx.exec_first("select 1 from postroom_outbox where seq = ?", (message.seq,)).await?;
        if taken.is_some() {
            restored.taken += 1;
            continue;
        }
        let sql = "insert into postroom_outbox (seq, id, topic, type, payload, `key`, routing_key, content_type, headers, tenant_id,
                                                aggregate_type, aggregate_id, aggregate_version, occurred_at)
                   values (:seq, :id, :topic, :type, :payload, :key, :routing_key, :content_type, :headers, :tenant_id, :aggregate_type,
                           :aggregate_id, :aggregate_version, timestampadd(microsecond, :occurred_us, '1970-01-01 00:00:00.000000'))";
        let parameters = params! {
            "seq" => message.seq, "id" => &id, "topic" => &message.topic, "type" => &message.kind,
            "payload" => message.payload.as_ref(), "key" => &message.key, "routing_key" => &message.routing_key,
            "content_type" => &message.content_type, "headers" => &message.headers, "tenant_id" => &message.tenant_id,
            "aggregate_type" => &message.aggregate_type, "aggregate_id" => &message.aggregate_id,
            "aggregate_version" => message.aggregate_version, "occurred_us" => message.occurred_us
        };
        tx.exec_drop(sql, parameters).await?;
        tx.exec_drop("update postroom_outbox set place = 0 where seq = ?", (message.seq,)).await?;
        let sql = "insert into postroom_archive_restored (seq, id, stays_until) values (?, ?, timestampadd(microsecond, ?, utc_timestamp(6)))
                   on duplicate key update stays_until = values(stays_until)";
        tx.exec_drop(sql, (message.seq, &id, stays)).await?;
        restored.restored += 1;
        restored.ids.push(MessageId::from(message.id));
    }
    if !restored.ids.is_empty() {
        let ids: Vec<String> = restored.ids.iter().map(MessageId::to_string).collect();
        let conditions = format!("{{\"stays_seconds\":{}}}", stays / 1_000_000);
        audit(&mut tx, deed, "archive.restore", &conditions, &ids).await?;
    }
    tx.commit().await?;
    Ok(restored)
}
