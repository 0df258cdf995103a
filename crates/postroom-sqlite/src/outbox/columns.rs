//! A message as one row of parameters.

use std::time::SystemTime;

use postroom::{EnqueueError, Message, MessageSpan, Step};

/// The index that refuses a second message of one id; SQLite names it in the error.
pub(crate) const ID_INDEX: &str = "postroom_outbox_id";

/// One row; the database's clock where no time is given.
pub(crate) const ENQUEUE_SQL: &str = "
insert into postroom_outbox (id, topic, type, payload, key, routing_key, content_type, headers, tenant_id, aggregate_type,
                             aggregate_id, aggregate_version, occurred_ms, visible_ms)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12,
        coalesce(?13, cast(unixepoch('subsec') * 1000 as integer)),
        case when ?14 > 0 then cast(unixepoch('subsec') * 1000 as integer) + ?14 end)";

/// The claim of an effect.
pub(crate) const ADMIT_SQL: &str =
    "insert into postroom_inbox (consumer, message_id) values (?1, ?2) on conflict (consumer, message_id) do nothing";

/// A trigger can leave out a row without an error; then the business transaction must not be committed without its message.
pub(crate) fn all_written(written: u64, message: &Message) -> Result<(), EnqueueError> {
    if written == 1 {
        return Ok(());
    }
    let problem = format!(
        "the database did not insert message {} and gave no error; look at the triggers of postroom_outbox",
        message.id
    );
    Err(EnqueueError::Store(problem.into()))
}

/// The same for a message that is written now, with the trace that it is written in.
pub(crate) fn stamped(message: &Message) -> Result<(Option<String>, Option<i64>, i64), EnqueueError> {
    let (mut headers, occurred, delay) = encoded(message)?;
    if let Some(with_trace) = MessageSpan::begin(Step::Create, message, "postroom", &message.topic).headers(message) {
        headers = Some(serde_json::to_string(&with_trace).map_err(|error| EnqueueError::Store(error.into()))?);
    }
    Ok((headers, occurred, delay))
}

/// Header JSON, occurred_at and delay in milliseconds: what SQLite has no type for.
pub(crate) fn encoded(message: &Message) -> Result<(Option<String>, Option<i64>, i64), EnqueueError> {
    let headers = if message.headers.is_empty() {
        None
    } else {
        Some(serde_json::to_string(&message.headers).map_err(|error| EnqueueError::Store(error.into()))?)
    };
    let occurred = message
        .occurred_at
        .and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok())
        .map(|since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX));
    let delay = i64::try_from(message.delay.as_millis()).unwrap_or(i64::MAX / 2);
    Ok((headers, occurred, delay))
}
