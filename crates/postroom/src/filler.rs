//! Who fills an inbox: of several processes that receive for one consumer, one at a time, by a lease in the store.
//!
//! Two fillers at once would keep the messages of a key in the order in which they happen to commit. Safety rests on the
//! epoch: every transaction that keeps messages is fenced by it. Clocks decide only when somebody else tries to take over.

use std::time::Duration;

use async_trait::async_trait;

use crate::consumer_store::Transactions;
use crate::error::StoreError;
use crate::inbox::Consumer;

/// The right to fill an inbox, until another process takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenure {
    /// The owner.
    pub owner: String,
    /// Increases with every change of owner.
    pub epoch: i64,
}

/// What a filler reports about itself with a renewal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FillerReport {
    /// What it receives from, for people, without secrets.
    pub source: Option<String>,
    /// Why nothing can be received now; none: the last try worked.
    pub source_down: Option<String>,
}

/// Who fills an inbox, as a store has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FillerSeen {
    /// The owner; none: it was given back.
    pub owner: Option<String>,
    /// Increases with every change of owner.
    pub epoch: i64,
    /// For how long each renewal holds.
    pub lease: Duration,
    /// Differs after every renewal; has no other meaning.
    pub renewal: i64,
    /// It was given back, or its lease has expired by the database's clock.
    pub free: bool,
}

/// The store's side of the lease, inside transactions of `Self::Tx`.
#[async_trait]
pub trait FillerStore: Transactions {
    /// Who fills the inbox of a consumer; none: no process ever has.
    async fn filler(tx: &mut Self::Tx<'_>, consumer: &Consumer) -> Result<Option<FillerSeen>, StoreError>;

    /// Takes an inbox over from the filler that was seen. `None`: that filler has renewed its lease since, or another was
    /// faster. Waits until transactions of the old filler that have passed their fence have ended, bounded by the session.
    async fn take_inbox(
        tx: &mut Self::Tx<'_>,
        consumer: &Consumer,
        owner: &str,
        lease: Duration,
        seen: Option<&FillerSeen>,
    ) -> Result<Option<Tenure>, StoreError>;

    /// Renews the lease, and records what the filler reports about itself. False: another filler has taken over.
    async fn renew_inbox(
        tx: &mut Self::Tx<'_>,
        consumer: &Consumer,
        tenure: &Tenure,
        lease: Duration,
        said: &FillerReport,
    ) -> Result<bool, StoreError>;

    /// Whether the tenure still holds; if so, nobody takes over before this transaction ends. Renewals do not wait for it.
    async fn fence_inbox(tx: &mut Self::Tx<'_>, consumer: &Consumer, tenure: &Tenure) -> Result<bool, StoreError>;

    /// Gives the inbox back, so that another process can take it at once.
    async fn leave_inbox(tx: &mut Self::Tx<'_>, consumer: &Consumer, tenure: &Tenure) -> Result<(), StoreError>;
}
