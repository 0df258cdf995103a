//! Messages that leave the outbox for an archive, and come back.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use postroom::{
    ArchiveState, ArchivedMessage, Deed, Expired, MessageId, Part, Restored, Retention, Segment, SegmentId, Sweep, Turn,
};
use tiberius::Row;
use tiberius::error::Error;
use uuid::Uuid;

use crate::conn::Conn;
use crate::desk::{Failed, begin as begin_tx};
use crate::operate::audit::audit;
use crate::operate::retain::{PASSED, expired, not_too_short, remove};
use crate::operate::uuid;
use crate::sql::{NOW, from_now, get, json, later, microseconds, named, seconds_since};

/// A segment is left to its process for so long. Two that are at it at once do the same work twice, and no harm.
const TAKEN_SECONDS: i64 = 60;
/// Rows that one step removes of what came back.
const FORGET: usize = 2_000;
/// A message `o` that a relay has yet to send: a route has not passed it, or somebody gave it out again.
const UNFINISHED: &str = "(o.place is null
    or exists (select 1 from postroom_routes r join postroom_parked p on p.route = r.name and p.seq = o.seq and p.id = o.id)
    or exists (select 1 from postroom_routes r left join postroom_lanes l on l.route = r.name and l.lane = o.lane
                where o.place > coalesce(l.position, 0)))";

/// What is known of the archive.
pub(crate) async fn state(conn: &mut Conn) -> Result<ArchiveState, Failed> {
    let sql = format!(
        "select s.outbox_id, s.archives, s.archived_segments,
                (select {} from postroom_archive_segments g where g.is_stored = 0) as unfinished
           from postroom_settings s",
        seconds_since("min(g.begun_at)")
    );
    let rows = conn.rows(&sql, named! {}).await?;
    let row = rows.first().ok_or_else(|| Error::Conversion("postroom_settings is empty".into()))?;
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
    let tx = begin_tx(conn).await?;
    // One process at a time begins a segment; and whoever removes without an archive is done, or waits.
    tx.first::<i64>("select only_row from postroom_settings with (updlock)", named! {}).await?;
    if others(tx).await? {
        return Ok(None);
    }
    let id = Uuid::from(MessageId::new());
    let sql = "insert into postroom_archive_leaving (segment, seq, id)
               select @segment, o.seq, o.id from openjson(@seqs) with (seq bigint '$') n join postroom_outbox o on o.seq = n.seq
                where not exists (select 1 from postroom_archive_leaving a where a.seq = o.seq and a.id = o.id)";
    if tx.exec(sql, named! { "segment" => id.to_string(), "seqs" => json(&seqs) }).await? == 0 {
        return Ok(None);
    }
    let sql = format!(
        "insert into postroom_archive_segments (id, begun_at, taken_until) values (@segment, {NOW}, dateadd(second, {TAKEN_SECONDS}, {NOW}))"
    );
    tx.exec(&sql, named! { "segment" => id.to_string() }).await?;
    tx.exec("update postroom_settings set archives = 1", named! {}).await?;
    tx.commit().await?;
    Ok(Some(Segment { id: id.into(), stored: false }))
}

/// Whether a segment is not stored yet.
async fn others(tx: &mut Conn) -> Result<bool, Error> {
    let sql = "select top (1) 1 from postroom_archive_segments where is_stored = 0";
    Ok(tx.first::<i64>(sql, named! {}).await?.is_some())
}

/// Takes a segment that nobody works on.
pub(crate) async fn take(conn: &mut Conn) -> Result<Turn, Failed> {
    let tx = begin_tx(conn).await?;
    let sql = format!(
        "select top (1) g.id, g.is_stored from postroom_archive_segments g with (updlock, rowlock, readcommittedlock, readpast)
          where g.taken_until < {NOW} order by g.begun_at"
    );
    let found: Option<(String, bool)> = tx.first(&sql, named! {}).await?;
    if let Some((id, stored)) = found {
        let sql = format!(
            "update postroom_archive_segments set taken_until = dateadd(second, {TAKEN_SECONDS}, {NOW}) where id = @segment"
        );
        tx.exec(&sql, named! { "segment" => &id }).await?;
        tx.commit().await?;
        return Ok(Turn::Ours(Segment { id: uuid(&id)?.into(), stored }));
    }
    Ok(if others(tx).await? { Turn::Others } else { Turn::Nobodys })
}

/// The messages of a segment.
pub(crate) async fn messages(conn: &mut Conn, segment: SegmentId) -> Result<Vec<ArchivedMessage>, Failed> {
    let sql = "select o.seq, o.id, o.topic, o.type, o.payload, o.[key], o.routing_key, o.content_type, o.headers, o.tenant_id,
                      o.aggregate_type, o.aggregate_id, o.aggregate_version,
                      datediff_big(microsecond, '1970-01-01', o.occurred_at) as occurred_us
                 from postroom_archive_leaving a join postroom_outbox o on o.seq = a.seq and o.id = a.id
                where a.segment = @segment order by o.seq";
    let rows = conn.rows(sql, named! { "segment" => segment.to_string() }).await?;
    Ok(rows.iter().map(archived).collect::<Result<_, _>>()?)
}

fn archived(row: &Row) -> Result<ArchivedMessage, Error> {
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
    let of = || named! { "segment" => &segment };
    let tx = begin_tx(conn).await?;
    let sql = "update postroom_archive_segments set is_stored = 1 where id = @segment and is_stored = 0";
    if tx.exec(sql, of()).await? > 0 {
        tx.exec("update postroom_settings set archived_segments = archived_segments + 1", named! {}).await?;
    }
    let sql = format!(
        "select o.seq from postroom_archive_leaving a join postroom_outbox o on o.seq = a.seq and o.id = a.id
           join {PASSED} w on w.lane = o.lane and o.place <= w.passed
          where a.segment = @segment and not {UNFINISHED}"
    );
    let finished: Vec<i64> = tx.query(&sql, of()).await?;
    let removed = remove(tx, &finished).await?;
    let sql = "select a.seq, a.id from postroom_archive_leaving a
                where a.segment = @segment and not exists (select 1 from postroom_outbox o where o.seq = a.seq and o.id = a.id)";
    let gone: Vec<(i64, String)> = tx.query(sql, of()).await?;
    delete(tx, "archive_leaving", &gone).await?;
    let sql = "delete from postroom_archive_segments
                where id = @segment and not exists (select 1 from postroom_archive_leaving a where a.segment = @segment)";
    tx.exec(sql, of()).await?;
    tx.commit().await?;
    Ok(removed)
}

/// Deletes rows by seq and id.
async fn delete(tx: &mut Conn, table: &str, rows: &[(i64, String)]) -> Result<(), Error> {
    let sql = format!(
        "delete a
           from openjson(@gone) with (seq bigint '$[0]', id uniqueidentifier '$[1]') n
           join postroom_{table} a with (rowlock) on a.seq = n.seq and a.id = n.id
         option (loop join, force order)"
    );
    tx.exec(&sql, named! { "gone" => json(rows) }).await.map(drop)
}

/// Removes what came back and whose time is over.
pub(crate) async fn forget_restored(conn: &mut Conn) -> Result<u64, Failed> {
    let due = format!("select top (1) 1 from postroom_archive_restored where stays_until < {NOW}");
    if conn.first::<i64>(&due, named! {}).await?.is_none() {
        return Ok(0);
    }
    let tx = begin_tx(conn).await?;
    let sql = format!(
        "select top ({FORGET}) a.seq, a.id from postroom_archive_restored a with (updlock, rowlock)
          where a.stays_until < {NOW}
            and not exists (select 1 from postroom_outbox o where o.seq = a.seq and o.id = a.id and {UNFINISHED})
          order by a.seq"
    );
    let due: Vec<(i64, String)> = tx.query(&sql, named! {}).await?;
    for table in ["outbox", "archive_restored"] {
        delete(tx, table, &due).await?;
    }
    tx.commit().await?;
    Ok(due.len() as u64)
}

/// Puts messages back. They have place 0, which every route has passed.
pub(crate) async fn restore(
    conn: &mut Conn,
    messages: &[ArchivedMessage],
    stays: Duration,
    deed: &Deed,
) -> Result<Restored, Failed> {
    let stays = microseconds(stays);
    // The highest seq that a message was given; the server goes on from there whatever is inserted below it.
    let newest: Option<i64> =
        conn.first("select convert(bigint, ident_current(N'postroom_outbox'))", named! {}).await?;
    let tx = begin_tx(conn).await?;
    // It ends with the call, and needs the right to alter the table.
    tx.batch("set identity_insert postroom_outbox on").await?;
    let restored = put_back(tx, messages, (stays, newest.unwrap_or_default()), deed).await?;
    tx.batch("set identity_insert postroom_outbox off").await?;
    tx.commit().await?;
    Ok(restored)
}

async fn put_back(
    tx: &mut Conn,
    messages: &[ArchivedMessage],
    (stays, newest): (i64, i64),
    deed: &Deed,
) -> Result<Restored, Failed> {
    let mut restored = Restored::default();
    for message in messages {
        let id = message.id.to_string();
        let sql = "select seq from postroom_outbox where id = @id";
        let here: Option<i64> = tx.first(sql, named! { "id" => &id }).await?;
        if let Some(seq) = here {
            restored.present += 1;
            let sql = format!(
                "update postroom_archive_restored set stays_until = case when stays_until > {0} then stays_until else {0} end
                  where seq = @seq and id = @id",
                from_now("@stays")
            );
            tx.exec(&sql, named! { "stays" => stays, "seq" => seq, "id" => &id }).await?;
            continue;
        }
        if message.seq > newest {
            restored.ahead += 1;
            continue;
        }
        let sql = "select 1 from postroom_outbox where seq = @seq";
        if tx.first::<i64>(sql, named! { "seq" => message.seq }).await?.is_some() {
            restored.taken += 1;
            continue;
        }
        let sql = format!(
            "insert into postroom_outbox (seq, place, id, topic, type, payload, [key], routing_key, content_type, headers, tenant_id,
                                          aggregate_type, aggregate_id, aggregate_version, occurred_at)
             values (@seq, 0, @id, @topic, @type, @payload, @key, @routing_key, @content_type, @headers, @tenant_id, @aggregate_type,
                     @aggregate_id, @aggregate_version, {})",
            later("@occurred_us", "convert(datetime2(6), '1970-01-01')")
        );
        let parameters = named! {
            "seq" => message.seq, "id" => &id, "topic" => &message.topic, "type" => &message.kind,
            "payload" => message.payload.as_ref(), "key" => message.key.as_ref(), "routing_key" => message.routing_key.as_ref(),
            "content_type" => &message.content_type, "headers" => message.headers.as_ref(), "tenant_id" => message.tenant_id.as_ref(),
            "aggregate_type" => message.aggregate_type.as_ref(), "aggregate_id" => message.aggregate_id.as_ref(),
            "aggregate_version" => message.aggregate_version, "occurred_us" => message.occurred_us
        };
        tx.exec(&sql, parameters).await?;
        let of = || named! { "seq" => message.seq, "id" => &id, "stays" => stays };
        tx.exec("delete from postroom_archive_restored where seq = @seq and id = @id", of()).await?;
        let sql = format!(
            "insert into postroom_archive_restored (seq, id, stays_until) values (@seq, @id, {})",
            from_now("@stays")
        );
        tx.exec(&sql, of()).await?;
        restored.restored += 1;
        restored.ids.push(MessageId::from(message.id));
    }
    if !restored.ids.is_empty() {
        let ids: Vec<String> = restored.ids.iter().map(MessageId::to_string).collect();
        let conditions = format!("{{\"stays_seconds\":{}}}", stays / 1_000_000);
        audit(tx, deed, "archive.restore", &conditions, &ids).await?;
    }
    Ok(restored)
}
