//! What an application does with a message.

use async_trait::async_trait;
use postroom::{Admission, BoxError, OnceError, Received};

/// How a message was handled; either way its effect is committed and it is acked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handled {
    /// It had its effect now.
    Applied,
    /// It had its effect before.
    Duplicate,
}

impl From<Admission> for Handled {
    fn from(admission: Admission) -> Self {
        match admission {
            Admission::New => Self::Applied,
            Admission::Duplicate => Self::Duplicate,
        }
    }
}

/// Why a message was not handled. Nothing of it may be committed.
#[derive(Debug, thiserror::Error)]
pub enum HandlerError {
    /// It may pass later: it is handled again, in its place, after a wait.
    #[error("handle the message for now")]
    Again(#[source] BoxError),
    /// It will never pass: it is rejected, and the broker drops or dead-letters it by its own configuration.
    #[error("handle the message")]
    Reject(#[source] BoxError),
}

impl From<OnceError> for HandlerError {
    /// A failure of the database or of the effect is tried again: dropping a message takes a deliberate `Reject`.
    fn from(error: OnceError) -> Self {
        Self::Again(error.into())
    }
}

/// Handles messages, one at a time; a receiver has several of them, each with its own connection.
///
/// Use the store's `once`, which claims the message in the inbox and runs the effect in the same transaction.
#[async_trait]
pub trait Handler: Send {
    /// Returns after the commit. May be called again with the same message at any time.
    async fn handle(&mut self, received: &Received) -> Result<Handled, HandlerError>;
}
