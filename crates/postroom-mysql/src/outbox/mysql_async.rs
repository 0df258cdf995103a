//! Enqueueing through mysql_async.

use async_trait::async_trait;
use mysql_async::prelude::Queryable;
use mysql_async::{Error, Params, Transaction, Value};
use postroom::{EnqueueError, Message, Outbox};

use crate::Mysql;
use crate::connect::DUPLICATE_ENTRY;
use crate::outbox::columns::{ENQUEUE_SQL, ID_INDEX, Stamped, occurred_us};

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
    let Stamped { headers, delay_us } = Stamped::of(message)?;
    let mut values: Vec<Value> = vec![message.id.to_string().into()];
    values.extend(values_of(message, headers));
    values.push(delay_us.into());
    Ok(Params::Positional(values))
}

/// Topic to aggregate version, and when it happened, in microseconds since 1970.
pub(crate) fn encoded(message: &Message) -> Result<[Value; 12], serde_json::Error> {
    let headers = (!message.headers.is_empty()).then(|| serde_json::to_string(&message.headers)).transpose()?;
    Ok(values_of(message, headers))
}

fn values_of(message: &Message, headers: Option<String>) -> [Value; 12] {
    [
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
        occurred_us(message).into(),
    ]
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
