//! What the consumer runtime needs of a store: to admit messages, and to keep those that wait.
//!
//! A message that a consumer has taken charge of is in the inbox, and in one of three places: its effect is committed, it
//! waits in the store (for a retry, behind another message of its key, or for an earlier version), or it is dead. So the
//! broker can be acked as soon as one of these is committed, and a repeated delivery is recognised.

use std::time::Duration;

use async_trait::async_trait;

use crate::delivery::Cause;
use crate::error::{BoxError, StoreError};
use crate::filler::FillerStore;
use crate::inbox::Consumer;
use crate::message::{Message, MessageId};

/// Names the transaction type of a store and driver.
pub trait Transactions: Send + Sync + 'static {
    /// The caller's own transaction.
    type Tx<'c>: Send;
}

/// Opens a worker's transactions. Each worker has a session, and each session a connection.
#[async_trait]
pub trait Session<F: Transactions>: Send + 'static {
    /// Begins a transaction, on a new connection if there is none or it broke. Waits for locks are bounded.
    async fn begin(&mut self) -> Result<F::Tx<'_>, StoreError>;
}

/// How an arrival was admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the effect of a duplicate must not be applied again"]
pub enum Admitted {
    /// It is in the inbox now, and its effect may be applied in this transaction.
    New,
    /// It is in the inbox now, and another message of its key waits in the store: keep this one behind it.
    Behind,
    /// It was already in the inbox.
    Duplicate,
}

/// A message that waits in the store, claimed by one worker.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// Names this claim; a later claim of the same message makes it invalid.
    pub claim: i64,
    /// Claims in a row, including this one, that ended without a report from the worker that had them.
    pub claims: u32,
    /// Attempts used up.
    pub attempts: u32,
    /// It waited for an earlier version, and the reorder window is over.
    pub window_over: bool,
    /// The message.
    pub message: Message,
}

/// How a message is kept in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep<'a> {
    /// Can be handed out as soon as it is the first of its key.
    Ready,
    /// Claimed by the worker that keeps it, for this long unless it is renewed.
    Claimed {
        /// The owner of the claim.
        owner: &'a str,
        /// How long it holds.
        lease: Duration,
    },
    /// It waits this long for an earlier version.
    Early {
        /// The reorder window.
        window: Duration,
    },
}

/// What happens to a claimed message.
#[derive(Debug, Clone, PartialEq)]
pub enum Settle {
    /// Its effect was applied, in this transaction.
    Done,
    /// It is tried again after a wait; its key waits with it.
    Retry {
        /// Wait by the database's clock.
        after: Duration,
        /// Attempts used up.
        attempts: u32,
        /// For the operator.
        error: String,
    },
    /// It waits this long for an earlier version; its key does not wait.
    Early {
        /// The reorder window, or when to look again.
        window: Duration,
    },
    /// It cannot be handled.
    Dead {
        /// Attempts used up.
        attempts: u32,
        /// Why.
        cause: Cause,
        /// For the operator.
        error: String,
    },
    /// Handling has not begun; the claim does not count.
    GivenBack,
}

/// The aggregate whose versions are counted.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Aggregate {
    /// Its type.
    pub kind: String,
    /// Its id.
    pub id: String,
}

/// The consumer's side of a store, inside transactions of `Self::Tx`. Everything here is committed or rolled back with the
/// caller's transaction.
#[async_trait]
pub trait ConsumerStore: FillerStore {
    /// Commits. An aborted transaction is an error: the server would roll it back without an error.
    async fn commit(tx: Self::Tx<'_>) -> Result<(), StoreError>;

    /// Claims `(consumer, id)` for each arrival, an id and its key; the answers are in the same order. Ids are distinct. A
    /// concurrent claim makes this one wait until the other ends, bounded by the session.
    async fn admit(
        tx: &mut Self::Tx<'_>,
        consumer: &Consumer,
        arrivals: &[(MessageId, Option<String>)],
    ) -> Result<Vec<Admitted>, StoreError>;

    /// Keeps messages that were admitted in this transaction. Returns the claim of the last one.
    async fn keep(
        tx: &mut Self::Tx<'_>,
        consumer: &Consumer,
        messages: &[Message],
        keep: Keep<'_>,
    ) -> Result<i64, StoreError>;

    /// Keeps a message as a dead letter if it cannot be kept among the waiting ones, with all its parts, however long. It was
    /// admitted in this transaction.
    async fn keep_dead(
        tx: &mut Self::Tx<'_>,
        consumer: &Consumer,
        message: &Message,
        error: &str,
    ) -> Result<(), StoreError>;

    /// Claims what is due, the first of each key only; at most `max`. Messages whose claims ended `claims_max` times without
    /// a report become dead letters instead.
    async fn take(
        tx: &mut Self::Tx<'_>,
        consumer: &Consumer,
        owner: &str,
        max: usize,
        lease: Duration,
        claims_max: u32,
    ) -> Result<Vec<Waiting>, StoreError>;

    /// Renews these claims, those that still hold.
    async fn renew(
        tx: &mut Self::Tx<'_>,
        consumer: &Consumer,
        claims: &[(MessageId, i64)],
        lease: Duration,
    ) -> Result<(), StoreError>;

    /// Settles a claimed message. False: the claim has expired and another worker has the message; roll back.
    async fn settle(
        tx: &mut Self::Tx<'_>,
        consumer: &Consumer,
        id: MessageId,
        claim: i64,
        settle: &Settle,
    ) -> Result<bool, StoreError>;

    /// The version that was last handled of an aggregate, if any; locks it until the end of the transaction.
    async fn version(
        tx: &mut Self::Tx<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
    ) -> Result<Option<i64>, StoreError>;

    /// Records the version that was handled, and releases the next one if it waits as an early one.
    async fn set_version(
        tx: &mut Self::Tx<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        version: i64,
    ) -> Result<(), StoreError>;

    /// Versions of an aggregate that wait in the store between two versions, in order: true for an early one, which
    /// waits only for its predecessor.
    async fn waiting_versions(
        tx: &mut Self::Tx<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        above: i64,
        below: i64,
    ) -> Result<Vec<(i64, bool)>, StoreError>;

    /// Whether the transaction is still the one that was begun. A handler can end it, on purpose or by a failure, on stores that
    /// then continue without a transaction.
    fn is_open(_tx: &Self::Tx<'_>) -> bool {
        true
    }

    /// Whether the store rejected the call because of what it was asked to keep: another message may succeed.
    fn refuses_the_message(error: &StoreError) -> bool;

    /// Whether an error that came out of a handler is the store's, and of what kind: `Busy` and `Unavailable` say nothing
    /// about the message.
    fn sort(error: BoxError) -> Result<StoreError, BoxError>;
}
