//! Rows of the outbox and of the parked messages.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use mysql_async::prelude::FromValue;
use mysql_async::{Error, FromRowError, Row};
use postroom::lane_book::Found;
use postroom::{Message, MessageId, headers_from_json};

/// What is read of a message, in this order; `o` is its table.
pub(crate) const MESSAGE: &str = "o.id, o.topic, o.type, o.payload, o.`key`, o.routing_key, o.content_type, o.headers, o.tenant_id,
    o.aggregate_type, o.aggregate_id, o.aggregate_version, timestampdiff(microsecond, '1970-01-01', o.occurred_at) as occurred_us";
/// The columns that are copied with a message.
pub(crate) const COPIED: &str =
    "bytes, id, topic, type, payload, `key`, routing_key, content_type, headers, tenant_id, aggregate_type,
    aggregate_id, aggregate_version, occurred_at";

/// What is known of a row before its payload is fetched.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    pub lane: u16,
    pub seq: i64,
    /// 0 for a parked one.
    pub place: i64,
    pub bytes: usize,
    pub topic: String,
    pub scheduled: bool,
    pub behind: bool,
    /// Parked or buried before a crash kept the position from passing it.
    pub dealt_with: bool,
}

/// A column by its name.
pub(crate) fn get<T: FromValue>(row: &mut Row, column: &str) -> Result<T, Error> {
    match row.take_opt::<T, _>(column) {
        Some(Ok(value)) => Ok(value),
        _ => Err(Error::Other(Box::new(FromRowError(row.clone())))),
    }
}

impl Head {
    pub fn of(mut row: Row) -> Result<Self, Error> {
        let row = &mut row;
        Ok(Self {
            lane: get(row, "lane")?,
            seq: get(row, "seq")?,
            place: get(row, "place")?,
            bytes: get::<i64>(row, "bytes")?.max(0) as usize,
            topic: get(row, "topic")?,
            scheduled: get(row, "scheduled")?,
            behind: get(row, "behind")?,
            dealt_with: get(row, "dealt_with")?,
        })
    }
}

/// The message of a row with the columns of [`MESSAGE`].
pub(crate) fn message(row: &mut Row) -> Result<Message, Error> {
    let id: String = get(row, "id")?;
    let occurred_us: Option<i64> = get(row, "occurred_us")?;
    let occurred_at = occurred_us.and_then(|us| match us {
        0.. => SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(us.unsigned_abs())),
        _ => SystemTime::UNIX_EPOCH.checked_sub(Duration::from_micros(us.unsigned_abs())),
    });
    Ok(Message {
        // The table's check makes it one.
        id: id.parse::<MessageId>().map_err(|error| Error::Other(error.into()))?,
        topic: get(row, "topic")?,
        kind: get(row, "type")?,
        key: get(row, "key")?,
        routing_key: get(row, "routing_key")?,
        payload: Bytes::from(get::<Vec<u8>>(row, "payload")?),
        content_type: get(row, "content_type")?,
        headers: headers_from_json(get::<Option<String>>(row, "headers")?.as_deref()),
        tenant_id: get(row, "tenant_id")?,
        aggregate_type: get(row, "aggregate_type")?,
        aggregate_id: get(row, "aggregate_id")?,
        aggregate_version: get(row, "aggregate_version")?,
        occurred_at,
        delay: Duration::ZERO,
    })
}

/// A message that can go out.
pub(crate) fn found(head: &Head, attempts: u32, message: Message) -> Found {
    Found {
        seq: head.seq,
        key: message.ordering_key().map(str::to_owned),
        attempts,
        scheduled: head.scheduled,
        behind: head.behind,
        deaths: 0,
        doubts: 0,
        unreadable: None,
        replay: None,
        message,
    }
}
