//! Enqueueing through rusqlite.

use postroom::{EnqueueError, Message};
use rusqlite::{Connection, ErrorCode, Transaction, params};

use crate::Sqlite;
use crate::outbox::columns::{ENQUEUE_SQL, ID_INDEX, all_written, stamped};

impl Sqlite {
    /// Writes `messages` into the caller's transaction, in their order. Blocks, as rusqlite does; takes a transaction and
    /// not a connection, so that a message cannot be enqueued outside one by accident.
    pub fn enqueue_blocking(&self, tx: &Transaction<'_>, messages: &[Message]) -> Result<(), EnqueueError> {
        enqueue(tx, messages)
    }
}

pub(crate) fn enqueue(tx: &Connection, messages: &[Message]) -> Result<(), EnqueueError> {
    for message in messages {
        message.check()?;
    }
    let mut statement = tx.prepare_cached(ENQUEUE_SQL).map_err(|error| EnqueueError::Store(error.into()))?;
    for message in messages {
        let (headers, occurred, delay) = stamped(message)?;
        let written = statement
            .execute(params![
                message.id.to_string(),
                message.topic,
                message.kind,
                message.payload.as_ref(),
                message.key,
                message.routing_key,
                message.content_type,
                headers,
                message.tenant_id,
                message.aggregate_type,
                message.aggregate_id,
                message.aggregate_version,
                occurred,
                delay,
            ])
            .map_err(|error| refused(message, error))?;
        all_written(written as u64, message)?;
    }
    Ok(())
}

fn refused(message: &Message, error: rusqlite::Error) -> EnqueueError {
    let text = error.to_string();
    if error.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) && text.contains(ID_INDEX) {
        EnqueueError::AlreadyEnqueued { id: message.id.to_string(), source: error.into() }
    } else {
        EnqueueError::Store(error.into())
    }
}
