//! Rows as they come from the file. SQLite checks little, so nothing in here fails on what a plain insert may have put there.

use std::time::{Duration, SystemTime};

use crate::text::Text;
use bytes::Bytes;
use postroom::lane_book::Found;
use postroom::{Message, MessageId, OperationId, headers_from_json};
use rusqlite::Row;
use rusqlite::types::ValueRef;

/// A message of the outbox or a parked one.
pub(crate) struct FoundRow {
    pub seq: i64,
    /// The id as the writer wrote it.
    pub written_id: String,
    pub attempts: u32,
    pub scheduled: bool,
    pub behind: bool,
    pub dealt_with: bool,
    /// The replay that it belongs to.
    pub replay: Option<OperationId>,
    /// Why the message cannot be sent.
    pub unreadable: Option<String>,
    pub message: Message,
}

impl FoundRow {
    pub fn of(row: &Row<'_>) -> Result<Self, rusqlite::Error> {
        let (message, unreadable) = message_of(row)?;
        Ok(Self {
            seq: row.get("seq")?,
            written_id: row.get("id")?,
            attempts: row.get("attempts")?,
            scheduled: row.get("scheduled")?,
            behind: row.get("behind")?,
            dealt_with: row.get("dealt_with")?,
            replay: row.get::<_, Option<String>>("replay")?.and_then(|id| id.parse().ok()),
            unreadable,
            message,
        })
    }

    pub fn found(self) -> Found {
        let Self { seq, attempts, scheduled, behind, replay, unreadable, message, .. } = self;
        let key = message.ordering_key().map(str::to_owned);
        Found { seq, key, attempts, scheduled, behind, deaths: 0, doubts: 0, unreadable, replay, message }
    }
}

/// The message of a row; and why it cannot be sent as it is, if so.
pub(crate) fn message_of(row: &Row<'_>) -> Result<(Message, Option<String>), rusqlite::Error> {
    // The table's check makes it 32 hexadecimal digits, however they are hyphenated.
    let id: String = row.get("id")?;
    let id = u128::from_str_radix(&id.replace('-', ""), 16).unwrap_or_default();
    let occurred_ms: Option<i64> = row.get("occurred_ms")?;
    let occurred = occurred_ms.map(|ms| Duration::from_millis(ms.max(0) as u64));
    let mut unreadable = Vec::new();
    let mut text = |column: &'static str| -> Result<Option<String>, rusqlite::Error> {
        let Some(Text { text, whole }) = row.get(column)? else { return Ok(None) };
        if !whole {
            unreadable.push(column);
        }
        Ok(Some(text))
    };
    let message = Message {
        id: MessageId::from(uuid::Uuid::from_u128(id)),
        topic: text("topic")?.unwrap_or_default(),
        kind: text("type")?.unwrap_or_default(),
        key: text("key")?,
        routing_key: text("routing_key")?,
        payload: bytes_of(row.get_ref("payload")?),
        content_type: text("content_type")?.unwrap_or_default(),
        headers: headers_from_json(text("headers")?.as_deref()),
        tenant_id: text("tenant_id")?,
        aggregate_type: text("aggregate_type")?,
        aggregate_id: text("aggregate_id")?,
        aggregate_version: row.get("aggregate_version")?,
        occurred_at: occurred.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since)),
        delay: Duration::ZERO,
    };
    let why =
        (!unreadable.is_empty()).then(|| format!("not UTF-8: {}; SQLite does not check it", unreadable.join(", ")));
    Ok((message, why))
}

/// A plain insert may have stored the payload as text: its bytes are what counts.
fn bytes_of(value: ValueRef<'_>) -> Bytes {
    match value {
        // A text need not be UTF-8.
        ValueRef::Blob(bytes) | ValueRef::Text(bytes) => Bytes::copy_from_slice(bytes),
        // The table's check lets no other type in.
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => Bytes::new(),
    }
}
