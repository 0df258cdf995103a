//! Messages that leave the outbox for an archive, and come back. What may leave, and when it is removed, only the functions in the database
//! decide.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use postroom::{
    ArchiveState, ArchivedMessage, Deed, Expired, MessageId, Part, Restored, Retention, Segment, SegmentId, StoreError,
    Sweep, Turn,
};
use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::dead::audit;
use crate::operate::retain::{ages_by_topic, next_place};
use crate::operate::session::OperatorSession;
use crate::text::Text;

/// Rows that one look reads.
const LOOK: i32 = 5_000;
/// A segment is left to its process for so long. Two that are at it at once do the same work twice, and no harm.
const TAKEN_SECONDS: f64 = 60.0;
/// Rows that one step removes of what came back.
const FORGET: i32 = 5_000;

/// What is known of the archive.
pub(crate) async fn state(connector: &Connector) -> Result<ArchiveState, StoreError> {
    let failed = |error| store_error("look at the archive's segments", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let sql = "select s.outbox_id, s.archives, s.archived_segments,
                      (select extract(epoch from clock_timestamp() - min(g.begun_at))::float8 from postroom.archive_segments g where not g.stored)
                 from postroom.settings s";
    let row = tx.query_one(sql, &[]).await.map_err(failed)?;
    let read = || -> Result<ArchiveState, tokio_postgres::Error> {
        Ok(ArchiveState {
            outbox: row.try_get(0)?,
            archives: row.try_get(1)?,
            segments: row.try_get::<_, i64>(2)?.unsigned_abs(),
            unfinished_seconds: row.try_get(3)?,
        })
    };
    read().map_err(failed)
}

/// One look for what may leave.
pub(crate) async fn find_expired(
    connector: &Connector,
    retention: &Retention,
    sweep: &mut Sweep,
) -> Result<Vec<Expired>, StoreError> {
    let failed = |error| store_error("look for messages to archive", error);
    if sweep.parts.first() != Some(&Part::Outbox) {
        sweep.parts.clear();
        return Ok(Vec::new());
    }
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let (patterns, ages, usual) = ages_by_topic(retention);
    let sql = "select e.seqs, e.bytes, e.last, e.more, sweep.lane + 1 >= s.lanes
                 from postroom.settings s
                cross join (values ($1::smallint)) sweep (lane)
                cross join lateral postroom.outbox_expired(sweep.lane, $2, $3, array(select a * interval '1 second' from unnest($4::float8[]) with ordinality u (a, place) order by place),
                                                           $5::float8 * interval '1 second', $6) e";
    let row = tx.query_one(sql, &[&sweep.lane, &sweep.after, &patterns, &ages, &usual, &LOOK]).await.map_err(failed)?;
    let read = || -> Result<_, tokio_postgres::Error> {
        let (seqs, bytes): (Vec<i64>, Vec<i64>) = (row.try_get(0)?, row.try_get(1)?);
        Ok((seqs, bytes, row.try_get(2)?, row.try_get(3)?, row.try_get(4)?))
    };
    let (seqs, bytes, last, more, was_the_last) = read().map_err(failed)?;
    let lane = sweep.lane;
    next_place(sweep, last, more, was_the_last);
    let expired = |(seq, bytes): (i64, i64)| Expired { lane, seq, bytes: bytes.unsigned_abs() };
    Ok(seqs.into_iter().zip(bytes).map(expired).collect())
}

/// Writes down what is about to leave.
pub(crate) async fn begin(connector: &Connector, messages: &[Expired]) -> Result<Option<Segment>, StoreError> {
    let failed = |error| store_error("begin to archive", error);
    let lanes: Vec<i16> = messages.iter().map(|message| message.lane).collect();
    let seqs: Vec<i64> = messages.iter().map(|message| message.seq).collect();
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    let sql = "select postroom.archive_begin($1, $2, $3::float8 * interval '1 second')";
    let begun = tx.query_one(sql, &[&lanes, &seqs, &TAKEN_SECONDS]).await.map_err(failed)?;
    let begun: Option<Uuid> = begun.try_get(0).map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(begun.map(|id| Segment { id: id.into(), stored: false }))
}

/// Takes a segment that nobody works on.
pub(crate) async fn take(connector: &Connector) -> Result<Turn, StoreError> {
    let failed = |error| store_error("go on with archiving", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    let sql = "select t.segment, t.stored, exists (select from postroom.archive_segments g where not g.stored)
                 from postroom.archive_take($1::float8 * interval '1 second') t";
    let row = tx.query_one(sql, &[&TAKEN_SECONDS]).await.map_err(failed)?;
    let id: Option<Uuid> = row.try_get(0).map_err(failed)?;
    let (stored, others): (Option<bool>, bool) = (row.try_get(1).map_err(failed)?, row.try_get(2).map_err(failed)?);
    tx.commit().await.map_err(failed)?;
    Ok(match (id, others) {
        (Some(id), _) => Turn::Ours(Segment { id: id.into(), stored: stored.unwrap_or_default() }),
        (None, true) => Turn::Others,
        (None, false) => Turn::Nobodys,
    })
}

/// The messages of a segment.
pub(crate) async fn messages(connector: &Connector, segment: SegmentId) -> Result<Vec<ArchivedMessage>, StoreError> {
    let failed = |error| store_error("read what is to be archived", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let rows = tx.query(include_str!("sql/archive_messages.sql"), &[segment.as_uuid()]).await.map_err(failed)?;
    rows.iter().map(archived).collect::<Result<_, _>>().map_err(failed)
}

fn archived(row: &Row) -> Result<ArchivedMessage, tokio_postgres::Error> {
    let mut unreadable = BTreeMap::new();
    let mut text = |column: &str| -> Result<Option<String>, tokio_postgres::Error> {
        let Some(Text { text, whole }) = row.try_get(column)? else { return Ok(None) };
        if !whole {
            unreadable.insert(column.to_owned(), Bytes::from(row.try_get::<_, Raw>(column)?.0));
        }
        Ok(Some(text))
    };
    Ok(ArchivedMessage {
        seq: row.try_get("seq")?,
        id: row.try_get("id")?,
        topic: text("topic")?.unwrap_or_default(),
        kind: text("type")?.unwrap_or_default(),
        payload: Bytes::from(row.try_get::<_, Vec<u8>>("payload")?),
        key: text("key")?,
        routing_key: text("routing_key")?,
        content_type: text("content_type")?.unwrap_or_default(),
        headers: text("headers")?,
        tenant_id: text("tenant_id")?,
        aggregate_type: text("aggregate_type")?,
        aggregate_id: text("aggregate_id")?,
        aggregate_version: row.try_get("aggregate_version")?,
        occurred_us: row.try_get("occurred_us")?,
        unreadable,
    })
}

/// The bytes of a text column.
struct Raw(Vec<u8>);

impl<'a> tokio_postgres::types::FromSql<'a> for Raw {
    fn from_sql(
        _: &tokio_postgres::types::Type,
        raw: &'a [u8],
    ) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(raw.to_vec()))
    }

    fn accepts(_: &tokio_postgres::types::Type) -> bool {
        true
    }
}

/// Removes the messages of a segment that the archive has.
pub(crate) async fn end(connector: &Connector, segment: SegmentId) -> Result<u64, StoreError> {
    number(connector, "remove what is archived", "select postroom.archive_end($1)", segment.as_uuid()).await
}

/// Removes what came back and whose time is over.
pub(crate) async fn forget_restored(connector: &Connector) -> Result<u64, StoreError> {
    number(connector, "remove what came back from the archive", "select postroom.archive_forget($1)", &FORGET).await
}

async fn number(
    connector: &Connector,
    what: &'static str,
    sql: &str,
    parameter: &(dyn tokio_postgres::types::ToSql + Sync),
) -> Result<u64, StoreError> {
    let failed = |error| store_error(what, error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    let number: i64 = tx.query_one(sql, &[parameter]).await.map_err(failed)?.try_get(0).map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(number.unsigned_abs())
}

/// Puts messages back into their places.
pub(crate) async fn restore(
    connector: &Connector,
    messages: &[ArchivedMessage],
    stays: Duration,
    deed: &Deed,
) -> Result<Restored, StoreError> {
    let failed = |error| store_error("put archived messages back; nothing was changed", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    let restored = put_back(&tx, messages, stays).await.map_err(failed)?;
    if !restored.ids.is_empty() {
        let ids: Vec<String> = restored.ids.iter().map(MessageId::to_string).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let conditions = format!("{{\"stays_seconds\":{}}}", stays.as_secs());
        audit(&tx, deed, "archive.restore", &conditions, &ids).await.map_err(failed)?;
    }
    tx.commit().await.map_err(failed)?;
    Ok(restored)
}

async fn put_back(
    tx: &Transaction<'_>,
    messages: &[ArchivedMessage],
    stays: Duration,
) -> Result<Restored, tokio_postgres::Error> {
    fn column<'a, T>(messages: &'a [ArchivedMessage], of: impl Fn(&'a ArchivedMessage) -> T) -> Vec<T> {
        messages.iter().map(of).collect()
    }
    let sql = "select r.restored, r.present, r.ahead, r.taken
                 from postroom.archive_restore($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14,
                                               $15::float8 * interval '1 second') r";
    let row = tx
        .query_one(
            sql,
            &[
                &column(messages, |message| message.seq),
                &column(messages, |message| message.id),
                &column(messages, |message| message.topic.as_str()),
                &column(messages, |message| message.kind.as_str()),
                &column(messages, |message| message.payload.as_ref()),
                &column(messages, |message| message.key.as_deref()),
                &column(messages, |message| message.routing_key.as_deref()),
                &column(messages, |message| message.content_type.as_str()),
                &column(messages, |message| message.headers.as_deref()),
                &column(messages, |message| message.tenant_id.as_deref()),
                &column(messages, |message| message.aggregate_type.as_deref()),
                &column(messages, |message| message.aggregate_id.as_deref()),
                &column(messages, |message| message.aggregate_version),
                &column(messages, |message| message.occurred_us),
                &stays.as_secs_f64(),
            ],
        )
        .await?;
    let ids: Vec<Uuid> = row.try_get(0)?;
    let count = |column: usize| row.try_get::<_, i64>(column).map(i64::unsigned_abs);
    Ok(Restored {
        restored: ids.len() as u64,
        ids: ids.into_iter().map(MessageId::from).collect(),
        present: count(1)?,
        ahead: count(2)?,
        taken: count(3)?,
        unreadable: 0,
    })
}
