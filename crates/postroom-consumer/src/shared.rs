//! What the workers of a receiver share: how it was set up, and the claims that they have in hand.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postroom::{Consumer, ConsumerStore, MessageId, RetryPolicy, Session, Waiting};
use tokio::sync::watch;

use crate::handlers::Handlers;

/// What all workers of a receiver share.
pub(crate) struct Shared<F: ConsumerStore> {
    pub consumer: Consumer,
    /// The broker's name in traces.
    pub system: &'static str,
    /// Where messages come from, for people.
    pub origin: String,
    pub owner: String,
    pub handlers: Handlers<F>,
    pub retry: RetryPolicy,
    pub timeout: Duration,
    pub lease: Duration,
    /// Claims in hand: they are renewed until they are settled.
    pub claims: Mutex<HashSet<(MessageId, i64)>>,
    pub open: Box<dyn Fn() -> Box<dyn Session<F>> + Send + Sync>,
    pub stopping: watch::Receiver<bool>,
}

impl<F: ConsumerStore> Shared<F> {
    fn claims(&self) -> MutexGuard<'_, HashSet<(MessageId, i64)>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims in hand.
    pub fn in_hand(&self) -> Vec<(MessageId, i64)> {
        self.claims().iter().copied().collect()
    }
}

/// Keeps a claim in hand; it is not renewed any more when this is dropped.
pub(crate) struct Hold<F: ConsumerStore> {
    shared: Arc<Shared<F>>,
    claim: (MessageId, i64),
}

impl<F: ConsumerStore> Hold<F> {
    pub fn on(shared: &Arc<Shared<F>>, waiting: &Waiting) -> Self {
        let claim = (waiting.message.id, waiting.claim);
        shared.claims().insert(claim);
        Self { shared: shared.clone(), claim }
    }
}

impl<F: ConsumerStore> Drop for Hold<F> {
    fn drop(&mut self) {
        self.shared.claims().remove(&self.claim);
    }
}

/// A waiting message in hand.
pub(crate) struct Held<F: ConsumerStore> {
    pub waiting: Waiting,
    pub _hold: Hold<F>,
}
