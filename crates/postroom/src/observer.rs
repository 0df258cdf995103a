//! What runs, for metrics and for people: events, one for each batch, and the current state.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use crate::delivery::Cause;

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Observed<'a> {
    /// The relay of this route.
    Route(&'a str),
    /// The filler of this consumer's inbox, or the receiver that handles its messages.
    Inbox(&'a str),
}

/// Something that happened, reported once for each batch and never for each message. Times are by this process's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Happened {
    /// The lease was renewed; for an inbox, also that it was asked for while another process has it.
    Renewed {
        /// Lanes held since; for an inbox 1 or 0.
        lanes: usize,
        /// How long it took.
        took: Duration,
    },
    /// The store handed out messages; none: there was nothing.
    Claimed {
        /// How many.
        messages: usize,
        /// How long it took.
        took: Duration,
    },
    /// The sink judged a batch.
    Published {
        /// Judged as stored.
        stored: usize,
        /// Judged as failed, for whatever reason.
        failed: usize,
        /// Skipped by the sink.
        skipped: usize,
        /// It is not known whether they are stored.
        unknown: usize,
        /// How long it took.
        took: Duration,
    },
    /// The sink was unavailable: no message of the batch was judged.
    Unavailable {
        /// Messages of the batch.
        messages: usize,
        /// How long it took.
        took: Duration,
    },
    /// The store recorded outcomes.
    Settled {
        /// How many.
        messages: usize,
        /// Of those, settled by a relay that had lost their lane: nothing was recorded.
        fenced: usize,
        /// How long it took.
        took: Duration,
    },
    /// Messages became dead letters, which are written.
    Died {
        /// Why.
        cause: Cause,
        /// How many.
        messages: usize,
    },
    /// Lanes were found to belong to another relay.
    LanesLost {
        /// How many.
        lanes: usize,
    },
    /// The store failed or could not be reached; the call is made again.
    StoreFailed {
        /// What was being done.
        what: &'static str,
    },
    /// Received messages were kept in an inbox table.
    Kept {
        /// New ones.
        kept: usize,
        /// Messages that were already there.
        duplicates: usize,
        /// Kept as dead letters.
        dead: usize,
        /// How long it took.
        took: Duration,
    },
    /// Received messages, or those that waited in the store, were handled.
    Handled {
        /// Done: they had their effect, or nobody handles their type and they are ignored by choice.
        done: usize,
        /// Not newer than what was handled of their aggregate: ignored, merged, or given to the compensation.
        out_of_order: usize,
        /// Messages that were already there.
        duplicates: usize,
        /// Kept in the store for later: behind others of their key, for an earlier version, or for another attempt.
        kept: usize,
        /// Kept as dead letters.
        dead: usize,
        /// Given back to the broker, or claimed by another worker in the meantime.
        given_up: usize,
        /// How long it took.
        took: Duration,
    },
}

/// Is told about every event. It is called between two steps of the work, so it must not block or wait.
pub trait Observer: Send + Sync {
    /// Something happened.
    fn event(&self, of: Observed<'_>, event: &Happened);

    /// Messages of a batch got through: the broker has just confirmed them, they have just been kept in the inbox, or their effect has
    /// just been committed. `written` are the
    /// times at which they were written, by the clock of the database in which they were written; messages without one are left out.
    fn through(&self, of: Observed<'_>, written: &mut dyn Iterator<Item = SystemTime>) {
        let _ = (of, written);
    }
}

/// Ignores all events.
impl Observer for () {
    fn event(&self, _: Observed<'_>, _: &Happened) {}
}

/// The current state of something: written by the task that runs, readable by anybody at any time. Clones share it.
#[derive(Debug, Default)]
pub struct Live<T>(Arc<Mutex<T>>);

impl<T> Clone for Live<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Clone + Default> Live<T> {
    /// Nothing is known yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The current state.
    pub fn now(&self) -> T {
        self.locked().clone()
    }

    /// Sets the current state.
    pub fn set(&self, now: T) {
        *self.locked() = now;
    }

    fn locked(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
