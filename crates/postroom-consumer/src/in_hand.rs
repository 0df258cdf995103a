//! Deliveries that are not settled: where the broker takes them back after a while, they are extended until they are.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use postroom::{Answer, Receipt, Subscription};

use crate::handler::chain;

type Receipts = Mutex<HashSet<Receipt>>;

/// The deliveries of one subscription that are not settled. Extending ends when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct InHand(Option<Arc<Receipts>>);

impl InHand {
    /// Extends what is in hand every third of the subscription's lease; does nothing where there is none.
    pub fn new(subscription: Arc<dyn Subscription>) -> Self {
        let Some(lease) = subscription.lease() else { return Self(None) };
        let receipts = Arc::new(Receipts::default());
        let watched: Weak<Receipts> = Arc::downgrade(&receipts);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(lease / 3).await;
                let Some(receipts) = watched.upgrade() else { return };
                let held: Vec<Receipt> = locked(&receipts).iter().copied().collect();
                drop(receipts);
                if !held.is_empty()
                    && let Err(error) = subscription.extend(&held).await
                {
                    tracing::debug!("deliveries were not extended; they may be delivered again: {}", chain(&error));
                }
            }
        });
        Self(Some(receipts))
    }

    pub fn add(&self, receipt: Receipt) {
        if let Some(receipts) = &self.0 {
            locked(receipts).insert(receipt);
        }
    }

    pub fn remove(&self, receipt: Receipt) {
        if let Some(receipts) = &self.0 {
            locked(receipts).remove(&receipt);
        }
    }

    pub fn remove_all(&self, answers: &[(Receipt, Answer)]) {
        answers.iter().for_each(|(receipt, _)| self.remove(*receipt));
    }
}

fn locked(receipts: &Receipts) -> MutexGuard<'_, HashSet<Receipt>> {
    receipts.lock().unwrap_or_else(PoisonError::into_inner)
}
