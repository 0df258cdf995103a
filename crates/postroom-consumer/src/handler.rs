//! What an application does with a message.

use std::error::Error;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Aggregate, BoxError, Message, Transactions};

/// Why a message was not handled. Everything in its transaction is rolled back.
#[derive(Debug)]
pub enum HandlerError {
    /// It may succeed later: it is tried again after a wait, and becomes a dead letter when its attempts are used up. Lock timeouts,
    /// serialization failures and broken connections of the store are recognised and use up no attempt.
    Again(BoxError),
    /// It will never succeed: it becomes a dead letter at once.
    Reject(BoxError),
}

impl HandlerError {
    /// It will never succeed, because of this.
    pub fn reject(error: impl Into<BoxError>) -> Self {
        Self::Reject(error.into())
    }
}

impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Again(error) | Self::Reject(error)) = self;
        f.write_str(&chain(error.as_ref()))
    }
}

/// So that `?` works on any error in a handler; a message is rejected only on purpose, with [`HandlerError::reject`].
impl<E: Error + Send + Sync + 'static> From<E> for HandlerError {
    fn from(error: E) -> Self {
        Self::Again(error.into())
    }
}

/// An error with its causes. Without the detail that PostgreSQL adds to a rejected row: it quotes the row, including the payload.
pub(crate) fn chain(error: &dyn Error) -> String {
    let without_detail = |error: &dyn Error| {
        let mut text = error.to_string();
        if let Some(at) = text.find("\nDETAIL: ") {
            text.truncate(at);
        }
        text
    };
    let mut text = without_detail(error);
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {}", without_detail(inner));
        cause = inner.source();
    }
    text
}

/// A message on its way to its handler.
#[derive(Debug)]
pub struct Incoming<M> {
    /// What the decoder made of the payload.
    pub body: M,
    /// The message itself, with id, key, headers, aggregate and version.
    pub message: Arc<Message>,
    /// Attempts used up before this one.
    pub attempts: u32,
    /// The version that was handled last, if this message is not newer: only with [`Stale::Merge`].
    pub merge_into: Option<i64>,
}

/// Applies messages of one type, in the transaction that also records them as applied.
///
/// Called again with the same message whenever the transaction did not commit. What it does outside the transaction is
/// not rolled back; use [`Call`] for that.
#[async_trait]
pub trait Handle<F: Transactions, M: Send + Sync>: Send + Sync + 'static {
    /// Does the work in `tx`, which it leaves open.
    async fn handle(&self, tx: &mut F::Tx<'_>, incoming: &Incoming<M>) -> Result<(), HandlerError>;
}

/// Applies an effect outside the database, such as a payment at another company, in two steps.
///
/// 1. The intent is committed: the message is kept in the store, claimed by this worker.
/// 2. `call` is made, outside of any transaction. It is repeated after a crash, always with the same key: the other side
///    must recognise a repeated key.
/// 3. `done` records the answer, in the transaction that settles the message.
#[async_trait]
pub trait Call<F: Transactions, M: Send + Sync>: Send + Sync + 'static {
    /// The other side's answer.
    type Answer: Send + Sync + 'static;

    /// Calls the other side. `idempotency_key` is built from consumer and message id, and is the same for each attempt.
    async fn call(&self, idempotency_key: &str, incoming: &Incoming<M>) -> Result<Self::Answer, HandlerError>;

    /// Records the answer in `tx`, which it leaves open.
    async fn done(&self, tx: &mut F::Tx<'_>, incoming: &Incoming<M>, answer: &Self::Answer)
    -> Result<(), HandlerError>;
}

/// What did not arrive in order.
#[derive(Debug)]
pub enum OutOfOrder<'a> {
    /// The reorder window ended and these versions are missing; `next` is handled after this.
    Missing {
        /// Of this aggregate.
        aggregate: &'a Aggregate,
        /// The missing versions; there may be very many if a writer skips versions.
        versions: RangeInclusive<i64>,
        /// The message that waited for them.
        next: &'a Message,
    },
    /// This message arrived after its version, or a later one, had been handled.
    Late {
        /// Of this aggregate.
        aggregate: &'a Aggregate,
        /// The message.
        message: &'a Message,
        /// The version that was handled last.
        handled: i64,
    },
}

/// Repairs what did not arrive in order: by replaying, merging, or telling somebody.
#[async_trait]
pub trait Compensate<F: Transactions>: Send + Sync + 'static {
    /// Does the work in `tx`, which it leaves open.
    async fn compensate(&self, tx: &mut F::Tx<'_>, what: &OutOfOrder<'_>) -> Result<(), HandlerError>;
}

/// What happens to a version that is not newer than the one handled last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stale {
    /// Nothing; it is counted.
    Ignore,
    /// Its handler gets it with the version that was handled last, in [`Incoming::merge_into`].
    Merge,
    /// The compensation gets it.
    Compensate,
}
