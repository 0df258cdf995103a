//! Rows as they come from the database, decoded before anything is changed: a row that cannot be read must not leave a
//! read half taken in.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use postroom::lane_book::{Asked, Found, Granted};
use postroom::{BoxError, Message, MessageId, OperationId, StoreError, headers_from_json};
use tokio_postgres::Row;
use uuid::Uuid;

use crate::log::position::{CatchUp, Position, xmax};
use crate::text::{Text, Texts};

/// One read of all lanes.
pub(crate) struct Read {
    pub snapshot: Arc<str>,
    pub xmax: u64,
    /// What the sequence of the outbox has come to.
    pub drawn: i64,
    /// Rows are where no read will look for them again, or have another message's seq: nothing of this read may be used.
    pub astray: bool,
    /// The route is not registered any more; nothing is known of its topics.
    pub unregistered: bool,
    pub rows: Vec<FoundRow>,
}

/// A row of the outbox.
pub(crate) struct FoundRow {
    pub lane: u16,
    pub seq: i64,
    pub late: bool,
    pub scheduled: bool,
    pub behind: bool,
    /// Beyond the bytes that were asked for: it comes without payload, to say that there is more.
    pub cut: bool,
    /// None: another route's, or dealt with already.
    pub message: Option<Message>,
    /// Why the message cannot be sent.
    pub unreadable: Option<String>,
}

/// A parked message.
pub(crate) struct ParkedRow {
    pub lane: u16,
    pub found: Found,
}

impl Read {
    pub fn of(rows: &[Row]) -> Result<Self, StoreError> {
        let (header, rows) = rows.split_first().ok_or_else(|| unreadable("the read returned no snapshot".into()))?;
        let snapshot: Arc<str> = get::<String>(header, "topic")?.into();
        let xmax = xmax(&snapshot).ok_or_else(|| unreadable(format!("snapshot {snapshot:?}").into()))?;
        let registered: bool = get(header, "wanted")?;
        let mut astray = get(header, "astray")?;
        let drawn: i64 = get(header, "seq")?;
        for row in rows {
            astray |= get::<bool>(row, "astray")? || drawn < get::<i64>(row, "seq")?;
        }
        let rows = rows.iter().map(FoundRow::of).collect::<Result<_, _>>()?;
        Ok(Self { snapshot, xmax, drawn, astray, unregistered: !registered, rows })
    }
}

impl Read {
    /// Keeps of all rows those of the first lanes, by seq, that have `messages` to hand out, and of the lanes asked only these
    /// and those without any rows: the others are as if they had not been asked. Returns those.
    pub fn keep_first(&mut self, messages: usize, asked: &mut Vec<Asked<Position>>) -> Vec<(u16, i64)> {
        let (mut kept, mut others, mut found) = (HashSet::new(), HashSet::new(), HashSet::new());
        for row in &self.rows {
            if kept.contains(&row.lane) || found.len() < messages && !others.contains(&row.lane) {
                kept.insert(row.lane);
                if row.message.is_some() || row.cut {
                    found.insert(row.lane);
                }
            } else {
                others.insert(row.lane);
            }
        }
        self.rows.retain(|row| kept.contains(&row.lane));
        let left_out = asked.extract_if(.., |ask| others.contains(&ask.lane));
        left_out.map(|ask| (ask.lane, ask.epoch)).collect()
    }
}

impl FoundRow {
    fn of(row: &Row) -> Result<Self, StoreError> {
        let (wanted, cut): (bool, bool) = (get(row, "wanted")?, get(row, "cut")?);
        let (message, unreadable) =
            if wanted && !cut { message_of(row).map(|(m, u)| (Some(m), u))? } else { (None, None) };
        Ok(Self {
            lane: get::<i16>(row, "lane")? as u16,
            seq: get(row, "seq")?,
            late: get(row, "late")?,
            scheduled: get(row, "scheduled")?,
            behind: get(row, "behind")?,
            cut,
            message,
            unreadable,
        })
    }
}

impl ParkedRow {
    pub fn of(row: &Row) -> Result<Self, StoreError> {
        let (message, unreadable) = message_of(row)?;
        let found = Found {
            seq: get(row, "seq")?,
            key: get::<Option<Text>>(row, "ordering_key")?.map(|key| key.text),
            attempts: get::<i32>(row, "attempts")?.max(0) as u32,
            scheduled: false,
            behind: false,
            deaths: get::<i32>(row, "deaths")?.max(0) as u32,
            doubts: get::<i32>(row, "doubts")?.max(0) as u32,
            unreadable,
            replay: get::<Option<Uuid>>(row, "replay")?.map(OperationId::from),
            message,
        };
        Ok(Self { lane: get::<i16>(row, "lane")? as u16, found })
    }
}

/// How many lanes are this relay's share, and which it was granted.
pub(crate) fn granted(rows: &[Row]) -> Result<(usize, Vec<Granted<Position>>), StoreError> {
    let (share, granted) = rows.split_first().ok_or_else(|| unreadable("the renewal returned no share".into()))?;
    let share = usize::try_from(get::<i64>(share, 1)?).map_err(|error| unreadable(error.into()))?;
    Ok((share, granted.iter().map(granted_lane).collect::<Result<_, _>>()?))
}

fn granted_lane(row: &Row) -> Result<Granted<Position>, StoreError> {
    let catch_up = match (get::<Option<String>>(row, 6)?, get::<Option<i64>>(row, 7)?) {
        (Some(snapshot), Some(seq)) => Some(CatchUp { snapshot: snapshot.into(), seq }),
        _ => None,
    };
    let snapshot = get::<String>(row, 3)?.into();
    let deaths = get::<i32>(row, 8)?.max(0) as u32;
    let position = Position { snapshot, seq: get(row, 4)?, floor: get(row, 5)?, catch_up };
    Ok(Granted { lane: get::<i16>(row, 0)? as u16, epoch: get(row, 1)?, kept: get(row, 2)?, position, deaths })
}

/// A seq and the transaction id taken after it was read.
pub(crate) fn checkpoint(row: &Row) -> Result<(i64, u64), StoreError> {
    let xid: String = get(row, 1)?;
    let xid = xid.parse().map_err(|error: std::num::ParseIntError| unreadable(error.into()))?;
    Ok((get(row, 0)?, xid))
}

fn unreadable(source: BoxError) -> StoreError {
    StoreError::Refused { what: "read a row of the outbox", source }
}

pub(crate) fn get<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    column: impl tokio_postgres::row::RowIndex + std::fmt::Display,
) -> Result<T, StoreError> {
    row.try_get(column).map_err(|error| unreadable(error.into()))
}

/// The message of a row; and why it cannot be sent as it is, if so.
pub(crate) fn message_of(row: &Row) -> Result<(Message, Option<String>), StoreError> {
    let mut texts = Texts::default();
    let message = Message {
        id: MessageId::from(get::<uuid::Uuid>(row, "id")?),
        topic: texts.get(row, "topic")?,
        kind: texts.get(row, "type")?,
        key: texts.get_opt(row, "key")?,
        routing_key: texts.get_opt(row, "routing_key")?,
        payload: Bytes::copy_from_slice(get(row, "payload")?),
        content_type: texts.get(row, "content_type")?,
        headers: headers_from_json(texts.get_opt(row, "headers")?.as_deref()),
        tenant_id: texts.get_opt(row, "tenant_id")?,
        aggregate_type: texts.get_opt(row, "aggregate_type")?,
        aggregate_id: texts.get_opt(row, "aggregate_id")?,
        aggregate_version: get(row, "aggregate_version")?,
        occurred_at: get(row, "occurred_at")?,
        delay: Duration::ZERO,
    };
    Ok((message, texts.unreadable()))
}
