//! What people and programs see of a store and do to it. The command line knows a store by this alone.

use std::time::Duration;

use async_trait::async_trait;

use crate::dead_letter::{DeadDeed, DeadFilter, DeadLetter, Deed, Side};
use crate::error::StoreError;
use crate::keys::{KeyDeed, Reception, WaitingKey, Whereabouts};
use crate::listing::{Forgotten, Listed, MessageFilter, StoredMessage};
use crate::message::MessageId;
use crate::route::{RouteChange, RouteSettings, ShownRoute};
use crate::status::{StoreStatus, UnroutedTopic};

/// The operator's end of a store.
///
/// Guarantees, on every implementation (the conformance suite of `postroom-testkit` checks them):
/// - what only looks writes nothing;
/// - a deed and its audit row are one transaction: there is no deed without its row, and no row without its deed;
/// - a deed on a key or on dead letters comes wholly before or wholly after what a relay records about the same key;
/// - a message keeps its id, and its key keeps its order.
#[async_trait]
pub trait Operator: Send + Sync {
    /// Backlog, parked and dead messages, and who relays them.
    async fn status(&self) -> Result<StoreStatus, StoreError>;

    /// Topics that no route takes, among the newest messages, most first; part of the status, and cheap enough to be asked for once
    /// a minute.
    async fn unrouted_topics(&self) -> Result<Vec<UnroutedTopic>, StoreError>;

    /// Routes that have run, by name.
    async fn routes(&self) -> Result<Vec<ShownRoute>, StoreError>;

    /// Changes what a route is; every relay has it with its next read. Returns what the route is then; none: there is no
    /// such route, and nothing was changed.
    async fn set_route(
        &self,
        route: &str,
        change: &RouteChange,
        deed: &Deed,
    ) -> Result<Option<RouteSettings>, StoreError>;

    /// Where a message is on every route that has run; empty: no route has it, or none has run.
    async fn whereabouts(&self, id: MessageId) -> Result<Vec<Whereabouts>, StoreError>;

    /// Where a message is at every consumer whose inbox is in this database; empty: none has received it.
    async fn receptions(&self, id: MessageId) -> Result<Vec<Reception>, StoreError>;

    /// Messages by filter, newest first, at most `limit`. Looks at a bounded number of rows and says so where that cut the list.
    async fn messages(&self, filter: &MessageFilter, limit: i64) -> Result<Listed, StoreError>;

    /// One message with its payload; none: the store has no copy of it (any more).
    async fn message(&self, id: MessageId) -> Result<Option<StoredMessage>, StoreError>;

    /// Removes a route that is gone for good, with its position, so that it holds up no clean-up any more. Refused while a relay runs
    /// it; without `discard` also while it has unsent or dead messages, which would go with it. `done` says whether it was removed.
    async fn forget_route(&self, route: &str, discard: bool, deed: &Deed) -> Result<Option<Forgotten>, StoreError>;

    /// Keys that wait, longest first, at most `limit`: of this route, or with [`Side::In`] of this consumer.
    async fn waiting_keys(&self, side: Side, of: Option<&str>, limit: i64) -> Result<Vec<WaitingKey>, StoreError>;

    /// Parks, unparks or skips a key of a route. False: there was nothing to do, and no audit row is written.
    ///
    /// What a relay has claimed of a parked key already, at most its window, still goes out, in order.
    async fn act_on_key(&self, route: &str, key: &str, what: KeyDeed, deed: &Deed) -> Result<bool, StoreError>;

    /// Dead letters by filter, oldest first, at most `limit`.
    async fn dead_letters(&self, side: Side, filter: &DeadFilter, limit: i64) -> Result<Vec<DeadLetter>, StoreError>;

    /// The payload of one dead letter; none: it is gone.
    async fn dead_payload(&self, side: Side, route: &str, seq: i64) -> Result<Option<Vec<u8>>, StoreError>;

    /// Gives dead letters back or deletes them, oldest first, at most `limit`. Returns those that it was done to. A letter
    /// that died a moment ago, and that the route's position has not passed, is not discarded: a crash would bring it back.
    ///
    /// A store may work in steps, each with an audit row; `progress` hears how many are done, and an error says it too.
    async fn act_on_dead(
        &self,
        what: DeadDeed,
        side: Side,
        filter: &DeadFilter,
        limit: i64,
        deed: &Deed,
        progress: &mut (dyn FnMut(usize) + Send),
    ) -> Result<Vec<DeadLetter>, StoreError>;

    /// Forgets messages of the inbox that were processed at least so long ago, in steps; `progress` hears how many are gone
    /// so far. Refused below the redelivery horizon.
    async fn prune_inbox(
        &self,
        older_than: Duration,
        deed: &Deed,
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<u64, StoreError>;
}
