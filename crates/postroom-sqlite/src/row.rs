//! Rows as they come from the file. SQLite checks little, so nothing in here fails on what a plain insert may have put there.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use postroom::{Message, MessageId, headers_from_json};
use rusqlite::Row;
use rusqlite::types::Value;

/// A message of the outbox or a parked one.
pub(crate) struct Found {
    pub seq: i64,
    /// The id as the writer wrote it.
    pub written_id: String,
    pub attempts: u32,
    pub scheduled: bool,
    pub behind: bool,
    pub dealt_with: bool,
    pub message: Message,
}

impl Found {
    pub fn of(row: &Row<'_>) -> Result<Self, rusqlite::Error> {
        Ok(Self {
            seq: row.get("seq")?,
            written_id: row.get("id")?,
            attempts: row.get("attempts")?,
            scheduled: row.get("scheduled")?,
            behind: row.get("behind")?,
            dealt_with: row.get("dealt_with")?,
            message: message_of(row)?,
        })
    }
}

pub(crate) fn message_of(row: &Row<'_>) -> Result<Message, rusqlite::Error> {
    // The table's check makes it 32 hexadecimal digits, however they are hyphenated.
    let id: String = row.get("id")?;
    let id = u128::from_str_radix(&id.replace('-', ""), 16).unwrap_or_default();
    let occurred_ms: Option<i64> = row.get("occurred_ms")?;
    let occurred = occurred_ms.map(|ms| Duration::from_millis(ms.max(0) as u64));
    Ok(Message {
        id: MessageId::from(uuid::Uuid::from_u128(id)),
        topic: row.get("topic")?,
        kind: row.get("type")?,
        key: row.get("key")?,
        routing_key: row.get("routing_key")?,
        payload: bytes_of(row.get("payload")?),
        content_type: row.get("content_type")?,
        headers: headers_from_json(row.get::<_, Option<String>>("headers")?.as_deref()),
        tenant_id: row.get("tenant_id")?,
        aggregate_type: row.get("aggregate_type")?,
        aggregate_id: row.get("aggregate_id")?,
        aggregate_version: row.get("aggregate_version")?,
        occurred_at: occurred.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since)),
        delay: Duration::ZERO,
    })
}

/// A plain insert may have stored the payload as text: its bytes are what counts.
fn bytes_of(value: Value) -> Bytes {
    match value {
        Value::Blob(bytes) => Bytes::from(bytes),
        Value::Text(text) => Bytes::from(text.into_bytes()),
        // The table's check lets no other type in.
        Value::Null | Value::Integer(_) | Value::Real(_) => Bytes::new(),
    }
}
