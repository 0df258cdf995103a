//! The insert of every driver.

use std::time::SystemTime;

use postroom::{EnqueueError, Message, MessageSpan, Step};

/// The index that refuses a second message of one id; the server names it in the error.
pub(crate) const ID_INDEX: &str = "postroom_outbox_id";

/// One row. Times are given in microseconds: those of the message since 1970, the delay from now on.
pub(crate) const ENQUEUE_SQL: &str = "
insert into postroom_outbox (id, topic, type, payload, `key`, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                             aggregate_version, occurred_at, visible_at)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,
        coalesce(timestampadd(microsecond, ?, '1970-01-01 00:00:00.000000'), utc_timestamp(6)),
        timestampadd(microsecond, ?, utc_timestamp(6)))";

/// Columns that are not a field as it is.
pub(crate) struct Stamped {
    /// With the trace of whoever enqueues.
    pub headers: Option<String>,
    pub delay_us: Option<i64>,
}

impl Stamped {
    pub fn of(message: &Message) -> Result<Self, EnqueueError> {
        // It ends when the message is encoded: the driver's statement is not in it.
        let with_trace = MessageSpan::begin(Step::Create, message, "postroom", &message.topic).headers(message);
        let headers = with_trace.as_ref().unwrap_or(&message.headers);
        let headers = (!headers.is_empty()).then(|| serde_json::to_string(headers)).transpose();
        let delay = i64::try_from(message.delay.as_micros()).unwrap_or(i64::MAX);
        Ok(Self {
            headers: headers.map_err(|error| EnqueueError::Store(error.into()))?,
            delay_us: (delay > 0).then_some(delay),
        })
    }
}

/// When it happened, in microseconds since 1970.
pub(crate) fn occurred_us(message: &Message) -> Option<i64> {
    message.occurred_at.map(|at| match at.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
        Err(before) => -i64::try_from(before.duration().as_micros()).unwrap_or(i64::MAX),
    })
}
