//! The receiving end of exactly-once effects: each consumer admits a message once.

use std::fmt;

use async_trait::async_trait;

use crate::error::{BoxError, StoreError};
use crate::limits::NAME_BYTES_MAX;
use crate::message::MessageId;

/// Name of a consumer: each consumer applies a message once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Consumer(String);

/// A name that no inbox accepts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("name a consumer {0:?}: the name must have 1 to 255 bytes without NUL")]
pub struct InvalidConsumer(String);

impl Consumer {
    /// A consumer's name: 1 to 255 bytes. Keep it for the lifetime of the consumer: a new name has seen no message.
    pub fn new(name: impl Into<String>) -> Result<Self, InvalidConsumer> {
        let name = name.into();
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') {
            return Err(InvalidConsumer(name));
        }
        Ok(Self(name))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Whether the effect of a message may be applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the effect of a duplicate must not be applied again"]
pub enum Admission {
    /// First time: apply the effect in the same transaction, commit, then ack.
    New,
    /// Its effect is already committed: ack.
    Duplicate,
}

/// Admits messages inside the consumer's own transaction: claim first, effect after, one commit for both.
#[async_trait]
pub trait Inbox<Tx: Send + ?Sized> {
    /// Claims `(consumer, id)`. A concurrent claim of the same pair makes this one wait until the other ends, bounded by
    /// the connection's own lock timeout.
    async fn admit(&self, tx: &mut Tx, consumer: &Consumer, id: MessageId) -> Result<Admission, StoreError>;
}

/// Why the effect of a message was not applied. Claim and effect were rolled back together.
#[derive(Debug, thiserror::Error)]
pub enum OnceError {
    /// The database failed; see [`StoreError::is_transient`] for whether the same message may succeed later.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The effect itself failed.
    #[error("apply the effect")]
    Effect(#[source] BoxError),
}
