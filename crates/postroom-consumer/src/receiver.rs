//! The loop between a subscription and its handlers: messages of one key go to one handler, in order.

use std::collections::hash_map::DefaultHasher;
use std::future::Future;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use postroom::{Received, Subscription};
use tokio::sync::{mpsc, watch};

use crate::handler::{Handled, Handler, HandlerError};

/// Deliveries that wait for one handler; the broker's prefetch bounds all of them together.
const WAITING_PER_HANDLER_MAX: usize = 256;
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_CAP: Duration = Duration::from_secs(30);

/// What a receiver has seen.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveCounters {
    /// Had their effect.
    pub applied: u64,
    /// Had had it before.
    pub duplicates: u64,
    /// Rejected: no message id, or the handler said so.
    pub rejected: u64,
}

#[derive(Default)]
struct Counts {
    applied: AtomicU64,
    duplicates: AtomicU64,
    rejected: AtomicU64,
}

/// Receives until it is stopped. A crash at any moment loses nothing: what is not acked comes again, and the inbox knows
/// whether it had its effect.
pub struct Receiver {
    subscription: Arc<dyn Subscription>,
    handlers: Vec<Box<dyn Handler>>,
}

impl Receiver {
    /// A receiver with as many messages in work at once as there are handlers. Order holds within a key.
    pub fn new(subscription: Arc<dyn Subscription>, handlers: Vec<Box<dyn Handler>>) -> Self {
        Self { subscription, handlers }
    }

    /// Runs until `stop` resolves, then finishes what was received, acks it, and returns. A broker that cannot be reached
    /// is tried again, with waits up to 30 s.
    pub async fn run(self, stop: impl Future<Output = ()>) -> ReceiveCounters {
        let counts = Counts::default();
        let (stopped, stopping) = watch::channel(false);
        let subscription = &self.subscription;
        let mut senders = Vec::new();
        let mut workers = Vec::new();
        for handler in self.handlers {
            let (sender, inbox) = mpsc::channel(WAITING_PER_HANDLER_MAX);
            senders.push(sender);
            workers.push(work(subscription.as_ref(), handler, inbox, &counts, stopping.clone()));
        }
        let receive = async {
            let mut stop = std::pin::pin!(stop);
            let mut wait = RETRY_FIRST;
            loop {
                let received = tokio::select! {
                    biased;
                    () = &mut stop => break,
                    received = subscription.receive() => received,
                };
                match received {
                    Ok(received) => {
                        wait = RETRY_FIRST;
                        let sender = &senders[slot_of(&received, senders.len())];
                        tokio::select! {
                            biased;
                            () = &mut stop => break,
                            sent = sender.send(received) => if sent.is_err() { break },
                        }
                    }
                    Err(error) => {
                        tracing::warn!("failed to {error}; trying again in {wait:?}");
                        tokio::select! {
                            () = &mut stop => break,
                            () = tokio::time::sleep(wait) => {}
                        }
                        wait = (wait * 2).min(RETRY_CAP);
                    }
                }
            }
            // Handlers that wait for a retry give up; what they have is not acked and comes again.
            let _ = stopped.send(true);
            drop(senders);
        };
        if workers.is_empty() {
            return ReceiveCounters::default();
        }
        tokio::join!(receive, join_all(workers));
        ReceiveCounters {
            applied: counts.applied.load(Ordering::Relaxed),
            duplicates: counts.duplicates.load(Ordering::Relaxed),
            rejected: counts.rejected.load(Ordering::Relaxed),
        }
    }
}

/// Messages of a key always meet the same handler; those without a key are spread by id.
fn slot_of(received: &Received, slots: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    match received.message.ordering_key() {
        Some(key) => key.hash(&mut hasher),
        None => received.message.id.hash(&mut hasher),
    }
    (hasher.finish() % slots.max(1) as u64) as usize
}

async fn work(
    subscription: &dyn Subscription,
    mut handler: Box<dyn Handler>,
    mut inbox: mpsc::Receiver<Received>,
    counts: &Counts,
    stopping: watch::Receiver<bool>,
) {
    while let Some(received) = inbox.recv().await {
        if *stopping.borrow() {
            // Given back rather than begun.
            let _ = subscription.requeue(&received).await;
            continue;
        }
        let answered = match handle(handler.as_mut(), &received, counts, stopping.clone()).await {
            Some(true) => subscription.ack(&received).await,
            Some(false) => subscription.reject(&received).await,
            None => subscription.requeue(&received).await,
        };
        if let Err(error) = answered {
            // The connection is gone and the message comes again; the inbox knows it.
            tracing::debug!("failed to {error}");
        }
    }
}

/// Handles one message until it is through. True: to be acked; false: to be rejected; none: stopped in between.
async fn handle(
    handler: &mut dyn Handler,
    received: &Received,
    counts: &Counts,
    mut stopping: watch::Receiver<bool>,
) -> Option<bool> {
    if received.id.is_none() {
        tracing::error!(routing_key = received.message.address(), "rejected a message without a message id");
        counts.rejected.fetch_add(1, Ordering::Relaxed);
        return Some(false);
    }
    let mut wait = RETRY_FIRST;
    loop {
        match handler.handle(received).await {
            Ok(Handled::Applied) => {
                counts.applied.fetch_add(1, Ordering::Relaxed);
                return Some(true);
            }
            Ok(Handled::Duplicate) => {
                counts.duplicates.fetch_add(1, Ordering::Relaxed);
                return Some(true);
            }
            Err(HandlerError::Reject(error)) => {
                tracing::error!(id = %received.message.id, "rejected a message: {error}");
                counts.rejected.fetch_add(1, Ordering::Relaxed);
                return Some(false);
            }
            Err(HandlerError::Again(error)) => {
                tracing::warn!(id = %received.message.id, "failed to handle a message, trying again in {wait:?}: {error}");
                tokio::select! {
                    _ = stopping.wait_for(|stopping| *stopping) => return None,
                    () = tokio::time::sleep(wait) => {}
                }
                wait = (wait * 2).min(RETRY_CAP);
            }
        }
    }
}
