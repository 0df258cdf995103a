//! The writing end: messages go into the caller's own transaction.

use async_trait::async_trait;

use crate::error::BoxError;
use crate::limits::LimitExceeded;
use crate::message::Message;

/// Why messages were not enqueued. Do not commit the caller's transaction: on PostgreSQL it is already aborted if the
/// database rejected them, so the failure cannot be ignored.
#[derive(Debug, thiserror::Error)]
pub enum EnqueueError {
    /// A message is larger than permitted; nothing was sent to the database.
    #[error(transparent)]
    Limit(#[from] LimitExceeded),
    /// Two messages have the same id, or the id is already in the outbox: this message was written before.
    #[error("enqueue message {id}: its id is already in the outbox, so it was written before; roll back")]
    AlreadyEnqueued {
        /// The id, as the database reports it.
        id: String,
        /// The driver's error.
        #[source]
        source: BoxError,
    },
    /// The database refused or could not be reached.
    #[error("enqueue messages; roll back")]
    Store(#[source] BoxError),
}

/// Writes messages inside a transaction of type `Tx`. It is implemented for transactions only, never for a pool or a
/// connection, so that a message cannot be enqueued outside a transaction by accident.
#[async_trait]
pub trait Outbox<Tx: Send + ?Sized> {
    /// Writes `messages` in one statement, in their order. They exist when the transaction commits, and only then.
    async fn enqueue(&self, tx: &mut Tx, messages: &[Message]) -> Result<(), EnqueueError>;
}
