//! Messages as parallel arrays, the form in which one statement takes many of them.

use std::time::{Duration, SystemTime};

use postroom::{EnqueueError, Message, MessageSpan, Step};
use uuid::Uuid;

/// Rows are inserted in the order of the arrays, which is the order of their seqs.
pub(crate) const ENQUEUE_SQL: &str = include_str!("sql/enqueue.sql");

/// Name of the unique index on ids, by which a message written twice is recognised.
pub(crate) const ID_INDEX: &str = "outbox_id";

/// A trigger can leave out rows without an error; then the business transaction must not be committed without its messages.
pub(crate) fn all_written(written: u64, messages: &[Message]) -> Result<(), EnqueueError> {
    if written == messages.len() as u64 {
        return Ok(());
    }
    let problem = format!(
        "the database inserted {written} of {} messages and gave no error; look at the triggers of postroom.outbox",
        messages.len()
    );
    Err(EnqueueError::Store(problem.into()))
}

/// One array a column.
#[derive(Default)]
pub(crate) struct Columns<'a> {
    pub ids: Vec<Uuid>,
    pub topics: Vec<&'a str>,
    pub kinds: Vec<&'a str>,
    pub payloads: Vec<&'a [u8]>,
    pub keys: Vec<Option<&'a str>>,
    pub routing_keys: Vec<Option<&'a str>>,
    pub content_types: Vec<&'a str>,
    pub headers: Vec<Option<String>>,
    pub tenant_ids: Vec<Option<&'a str>>,
    pub aggregate_types: Vec<Option<&'a str>>,
    pub aggregate_ids: Vec<Option<&'a str>>,
    pub aggregate_versions: Vec<Option<i64>>,
    /// Microseconds since the Unix epoch.
    pub occurred_ats: Vec<Option<i64>>,
    /// Microseconds; zero for none.
    pub delays: Vec<i64>,
    /// They end when the messages are written.
    spans: Vec<MessageSpan>,
}

impl<'a> Columns<'a> {
    /// Checks every message before anything is sent.
    pub fn of(messages: &'a [Message]) -> Result<Self, EnqueueError> {
        for message in messages {
            message.check()?;
        }
        let mut columns = Self::as_they_are(messages).map_err(|error| EnqueueError::Store(error.into()))?;
        for (index, message) in messages.iter().enumerate() {
            let span = MessageSpan::begin(Step::Create, message, "postroom", &message.topic);
            if let Some(headers) = span.headers(message) {
                columns.headers[index] =
                    Some(serde_json::to_string(&headers).map_err(|error| EnqueueError::Store(error.into()))?);
                columns.spans.push(span);
            }
        }
        Ok(columns)
    }

    /// Messages that somebody else let in.
    pub fn as_they_are(messages: &'a [Message]) -> Result<Self, serde_json::Error> {
        let mut columns = Self::default();
        for message in messages {
            columns.ids.push(message.id.into());
            columns.topics.push(&message.topic);
            columns.kinds.push(&message.kind);
            columns.payloads.push(&message.payload);
            columns.keys.push(message.key.as_deref());
            columns.routing_keys.push(message.routing_key.as_deref());
            columns.content_types.push(&message.content_type);
            columns.headers.push(if message.headers.is_empty() {
                None
            } else {
                Some(serde_json::to_string(&message.headers)?)
            });
            columns.tenant_ids.push(message.tenant_id.as_deref());
            columns.aggregate_types.push(message.aggregate_type.as_deref());
            columns.aggregate_ids.push(message.aggregate_id.as_deref());
            columns.aggregate_versions.push(message.aggregate_version);
            columns.occurred_ats.push(message.occurred_at.map(micros_since_epoch));
            columns.delays.push(i64::try_from(message.delay.as_micros()).unwrap_or(i64::MAX));
        }
        Ok(columns)
    }
}

fn micros_since_epoch(at: SystemTime) -> i64 {
    match at.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
        Err(before) => -i64::try_from(before.duration().as_micros()).unwrap_or(i64::MAX),
    }
}

/// Whole milliseconds, one at least.
pub(crate) fn milliseconds(lease: Duration) -> i64 {
    i64::try_from(lease.as_millis()).unwrap_or(i64::MAX).clamp(1, 366 * 24 * 3_600_000)
}

/// SQLSTATE classes that speak of the values that were to be kept: data exceptions, constraints, limits of the program such as
/// the size of an index row.
pub(crate) fn is_about_values(code: &str) -> bool {
    ["22", "23", "54"].iter().any(|class| code.starts_with(class))
}
