//! Enqueueing through mysql_async.

use std::time::SystemTime;

use async_trait::async_trait;
use mysql_async::prelude::Queryable;
use mysql_async::{Error, Params, Transaction, Value};
use postroom::{EnqueueError, Message, MessageSpan, Outbox, Step};

use crate::Mysql;

/// The index that refuses a second message of one id; the server names it in the error.
const ID_INDEX: &str = "postroom_outbox_id";
const DUPLICATE_ENTRY: u16 = 1062;

/// One row. Times are given in microseconds: those of the message since 1970, the delay from now on.
const ENQUEUE_SQL: &str = "
insert into postroom_outbox (id, topic, type, payload, `key`, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                             aggregate_version, occurred_at, visible_at)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,
        coalesce(timestampadd(microsecond, ?, '1970-01-01 00:00:00.000000'), utc_timestamp(6)),
        timestampadd(microsecond, ?, utc_timestamp(6)))";

#[async_trait]
impl<'t> Outbox<Transaction<'t>> for Mysql {
    async fn enqueue(&self, tx: &mut Transaction<'t>, messages: &[Message]) -> Result<(), EnqueueError> {
        for message in messages {
            message.check()?;
        }
        for message in messages {
            let row = row(message)?;
            tx.exec_drop(ENQUEUE_SQL, row).await.map_err(|error| refused(message, error))?;
        }
        Ok(())
    }
}

fn row(message: &Message) -> Result<Params, EnqueueError> {
    // It ends when the message is encoded: the driver's statement is not in it.
    let with_trace = MessageSpan::begin(Step::Create, message, "postroom", &message.topic).headers(message);
    let stamped = with_trace.map(|headers| Message { headers, ..message.clone() });
    let message = stamped.as_ref().unwrap_or(message);
    let delay = i64::try_from(message.delay.as_micros()).unwrap_or(i64::MAX);
    let mut values: Vec<Value> = vec![message.id.to_string().into()];
    values.extend(encoded(message).map_err(|error| EnqueueError::Store(error.into()))?);
    values.push((delay > 0).then_some(delay).into());
    Ok(Params::Positional(values))
}

/// Topic to aggregate version, and when it happened, in microseconds since 1970.
pub(crate) fn encoded(message: &Message) -> Result<[Value; 12], serde_json::Error> {
    let headers = (!message.headers.is_empty()).then(|| serde_json::to_string(&message.headers)).transpose()?;
    let occurred = message.occurred_at.map(|at| match at.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
        Err(before) => -i64::try_from(before.duration().as_micros()).unwrap_or(i64::MAX),
    });
    Ok([
        message.topic.as_str().into(),
        message.kind.as_str().into(),
        message.payload.as_ref().into(),
        message.key.as_deref().into(),
        message.routing_key.as_deref().into(),
        message.content_type.as_str().into(),
        headers.into(),
        message.tenant_id.as_deref().into(),
        message.aggregate_type.as_deref().into(),
        message.aggregate_id.as_deref().into(),
        message.aggregate_version.into(),
        occurred.into(),
    ])
}

fn refused(message: &Message, error: Error) -> EnqueueError {
    let written_before = matches!(&error, Error::Server(server)
        if server.code == DUPLICATE_ENTRY && server.message.contains(ID_INDEX));
    if written_before {
        EnqueueError::AlreadyEnqueued { id: message.id.to_string(), source: error.into() }
    } else {
        EnqueueError::Store(error.into())
    }
}
