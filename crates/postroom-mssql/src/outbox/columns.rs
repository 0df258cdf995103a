//! The insert, and what of a message is in which column.

use std::time::SystemTime;

use postroom::{EnqueueError, Message, MessageSpan, Step};

use crate::sql::{Named, Value, later, microseconds, named};

/// The constraint that refuses a second message of one id; the server names it in the error.
pub(crate) const ID_CONSTRAINT: &str = "postroom_outbox_id";

/// One row; nothing outside a transaction. Times are given in microseconds: those of the message since 1970, the delay from now on.
pub(crate) fn enqueue_sql() -> String {
    format!(
        "if @@trancount = 0 begin; throw 50001, N'postroom: there is no transaction; begin the one that writes the business rows first', 1; end;
         insert into postroom_outbox (id, topic, type, payload, [key], routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                                      aggregate_version, occurred_at, visible_at)
         values (@id, @topic, @type, @payload, @key, @routing_key, @content_type, @headers, @tenant_id, @aggregate_type, @aggregate_id,
                 @aggregate_version, coalesce({}, sysutcdatetime()), {})",
        later("@occurred", "convert(datetime2(6), '1970-01-01')"),
        later("@delay", "sysutcdatetime()"),
    )
}

/// The row of a message that is enqueued: with the trace of whoever does so.
pub(crate) fn row(message: &Message) -> Result<Named, EnqueueError> {
    // It ends when the message is encoded: the driver's statement is not in it.
    let with_trace = MessageSpan::begin(Step::Create, message, "postroom", &message.topic).headers(message);
    let headers = with_trace.as_ref().unwrap_or(&message.headers);
    let headers = (!headers.is_empty()).then(|| serde_json::to_string(headers)).transpose();
    let headers = headers.map_err(|error| EnqueueError::Store(error.into()))?;
    let delay = microseconds(message.delay);
    let mut row = columns(message, headers);
    row.extend(named! { "delay" => (delay > 0).then_some(delay) });
    Ok(row)
}

/// The columns of a message, `@id` to `@occurred`, as it came.
pub(crate) fn values_of(message: &Message) -> Result<Named, serde_json::Error> {
    let headers = (!message.headers.is_empty()).then(|| serde_json::to_string(&message.headers)).transpose()?;
    Ok(columns(message, headers))
}

fn columns(message: &Message, headers: Option<String>) -> Named {
    named! {
        "id" => message.id.to_string(),
        "topic" => message.topic.as_str(),
        "type" => message.kind.as_str(),
        "payload" => message.payload.as_ref(),
        "key" => message.key.as_deref(),
        "routing_key" => message.routing_key.as_deref(),
        "content_type" => message.content_type.as_str(),
        "headers" => headers,
        "tenant_id" => message.tenant_id.as_deref(),
        "aggregate_type" => message.aggregate_type.as_deref(),
        "aggregate_id" => message.aggregate_id.as_deref(),
        "aggregate_version" => message.aggregate_version,
        "occurred" => Value::Int(occurred_us(message)),
    }
}

/// From year 1 to 9999: the times that a column can hold.
const TIMES: std::ops::RangeInclusive<i64> = -62_135_596_800_000_000..=253_402_300_799_000_000;

/// When it happened, in microseconds since 1970; the nearest that can be stored.
fn occurred_us(message: &Message) -> Option<i64> {
    let at = message.occurred_at.map(|at| match at.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
        Err(before) => -i64::try_from(before.duration().as_micros()).unwrap_or(i64::MAX),
    });
    at.map(|at| at.clamp(*TIMES.start(), *TIMES.end()))
}
