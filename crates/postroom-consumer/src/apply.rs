//! The effect of one message in an open transaction: its version, its handler, and what follows from either.

use std::sync::Arc;
use std::time::Duration;

use postroom::{ConsumerStore, Message, MessageSpan, Step, StoreError};

use crate::handler::{HandlerError, OutOfOrder, Stale};
use crate::handlers::{Answer, Unknown};
use crate::shared::Shared;
use crate::versions::{Gap, Turn, gap, turn};

/// When a version whose window is over, and that still cannot go, is looked at again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What became of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Applied,
    Merged,
    /// Older than what was handled, by choice without effect.
    Ignored,
    /// Older than what was handled; the compensation has it.
    Compensated,
    Duplicate,
    /// Of a type that nobody handles, by choice without effect.
    Unknown,
    /// It waits in the store behind another of its key.
    Kept,
    /// It waits in the store for an earlier version.
    Early,
    /// It failed and waits in the store.
    Retried,
    Dead,
    /// Another worker has it now.
    Lost,
    /// Nothing became of it; the broker is to deliver it again.
    Requeue,
    /// Of a type that nobody handles, which stops the receiver.
    Refused,
    /// The store refuses it even as a dead one; the broker is to deliver it again, later.
    Unkept,
}

/// What became of a message, and how many versions were found missing on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct End {
    pub fate: Fate,
    pub missing: u64,
}

impl From<Fate> for End {
    fn from(fate: Fate) -> Self {
        Self { fate, missing: 0 }
    }
}

/// Why a script did not end.
pub(crate) enum Trouble {
    /// The store could not do it now, before anything of a message was begun.
    Store(StoreError),
    /// The store could not do it now; a handler had been called.
    Begun(StoreError),
    /// The message at this place.
    Message(HandlerError),
    /// A handler hung or panicked: the connection is not to be used again.
    Hung(String),
    /// The type of a message that stops the receiver.
    Refused,
    /// The outside is to be called first.
    Call,
}

impl Trouble {
    /// The same after a handler was called: what the store refuses then, it refuses for the message's sake.
    pub fn begun(self) -> Self {
        match self {
            Self::Store(error @ (StoreError::Busy { .. } | StoreError::Unavailable { .. })) => Self::Begun(error),
            Self::Store(error) => Self::Message(HandlerError::Again(error.into())),
            other => other,
        }
    }
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// The span of a handler.
pub(crate) fn span<F: ConsumerStore>(shared: &Shared<F>, message: &Message) -> MessageSpan {
    MessageSpan::begin(Step::Process, message, shared.system, shared.consumer.as_str())
}

pub(crate) fn sorted<F: ConsumerStore>(error: HandlerError) -> Trouble {
    match error {
        HandlerError::Again(error) => match F::sort(error) {
            Ok(store) => Trouble::Store(store),
            Err(error) => Trouble::Message(HandlerError::Again(error)),
        },
        rejected => Trouble::Message(rejected),
    }
}

/// Has the effect of one message in the transaction. Also returns the window, if it is to wait for an earlier version.
pub(crate) async fn apply<F: ConsumerStore>(
    shared: &Shared<F>,
    tx: &mut F::Tx<'_>,
    message: &Arc<Message>,
    attempts: u32,
    window_over: bool,
    answer: Option<&Answer>,
) -> Result<(End, Option<Duration>), Trouble> {
    let (handlers, consumer) = (&shared.handlers, &shared.consumer);
    let mut missing = 0;
    let mut merge_into = None;
    let versioned = handlers.version_of(message);
    if let Some((versions, aggregate, version)) = &versioned {
        let last = F::version(tx, consumer, aggregate).await?;
        match turn(*versions, last, *version, window_over) {
            Turn::Now => {}
            Turn::Early(window) => return Ok((Fate::Early.into(), Some(window))),
            Turn::Stale(Stale::Ignore, _) => return Ok((Fate::Ignored.into(), None)),
            Turn::Stale(Stale::Merge, last) => merge_into = Some(last),
            Turn::Stale(Stale::Compensate, handled) => {
                let late = OutOfOrder::Late { aggregate, message, handled };
                handlers.compensate(tx, &late).await.map_err(sorted::<F>)?;
                return Ok((Fate::Compensated.into(), None));
            }
            Turn::WindowOver { expected } => {
                let between =
                    F::waiting_versions(tx, consumer, aggregate, expected.saturating_sub(1), *version).await?;
                match gap(expected, *version, &between) {
                    Gap::Waits => return Ok((Fate::Early.into(), Some(LOOK_AGAIN))),
                    Gap::LetGo => {
                        F::set_version(tx, consumer, aggregate, expected.saturating_sub(1)).await?;
                        return Ok((Fate::Early.into(), Some(LOOK_AGAIN)));
                    }
                    Gap::Missing(versions) => {
                        missing = versions.clone().count() as u64;
                        let last_missing = *versions.end();
                        let gap = OutOfOrder::Missing { aggregate, versions, next: message };
                        handlers.compensate(tx, &gap).await.map_err(sorted::<F>)?;
                        F::set_version(tx, consumer, aggregate, last_missing).await?;
                        if last_missing.saturating_add(1) != *version {
                            // It has waited for its window already.
                            return Ok((End { fate: Fate::Early, missing }, Some(LOOK_AGAIN)));
                        }
                    }
                }
            }
        }
    }
    let fate = match handlers.of(&message.kind) {
        Some(handler) if handler.calls() && answer.is_none() => return Err(Trouble::Call),
        Some(handler) => {
            let span = span(shared, message);
            let handled = span.around(handler.handle(tx, message, attempts, merge_into, answer)).await;
            handled.inspect_err(|error| span.failed(&error.to_string())).map_err(sorted::<F>)?;
            if !F::is_open(tx) {
                let error = "its handler ended the transaction, on purpose or by ignoring an error";
                return Err(Trouble::Message(HandlerError::Again(error.into())));
            }
            if merge_into.is_some() { Fate::Merged } else { Fate::Applied }
        }
        None => match handlers.on_unknown() {
            Unknown::Ignore => Fate::Unknown,
            Unknown::Fail => return Err(Trouble::Refused),
            Unknown::DeadLetter => {
                let error = format!("no handler takes type {:?}", message.kind);
                return Err(Trouble::Message(HandlerError::reject(error)));
            }
        },
    };
    if let Some((_, aggregate, version)) = versioned.filter(|_| merge_into.is_none()) {
        F::set_version(tx, consumer, &aggregate, version).await?;
    }
    Ok((End { fate, missing }, None))
}
