//! What people and programs see of a store and do to it. The command line uses a store only through this.

use std::time::Duration;

use async_trait::async_trait;

use crate::archive::Archivable;
use crate::dead_group::{DeadNote, Headline};
use crate::dead_letter::{DeadCursor, DeadDeed, DeadFilter, DeadLetter, Deed, Side};
use crate::error::StoreError;
use crate::keys::{KeyDeed, WaitingKey, Whereabouts};
use crate::listing::{Forgotten, Listed, MessageFilter, StoredMessage};
use crate::message::MessageId;
use crate::operation::{NewOperation, OperationEffects, OperationId, ShownOperation, Steer, Stepped, Survey};
use crate::reception::Reception;
use crate::reconcile::Reconcilable;
use crate::retention::{Removed, Retention, Sweep};
use crate::route::{RouteChange, RouteSettings, ShownRoute};
use crate::status::{StoreStatus, UnroutedTopic};
use crate::vitals::Vitals;

/// The operator's end of a store.
///
/// Guarantees, on every implementation (the conformance suite of `postroom-testkit` checks them):
/// - reading writes nothing;
/// - a deed and its audit row are one transaction: there is no deed without its row, and no row without its deed;
/// - a deed on a key or on dead letters happens completely before or completely after what a relay records about the same key;
/// - a message keeps its id, and its key keeps its order.
#[async_trait]
pub trait Operator: Archivable + Reconcilable {
    /// Backlog, parked and dead messages, and who relays them.
    async fn status(&self) -> Result<StoreStatus, StoreError>;

    /// Whether a relay of these routes would find something to do now, for programs that look at many stores in turn: messages that it has not
    /// read, parked ones that are due, or a route that is not registered yet; operations are not looked at. True where it is not sure; never false
    /// where something has committed and is due.
    async fn work_waits(&self, routes: &[String]) -> Result<bool, StoreError>;

    /// Topics that no route takes, among the newest messages, most messages first; part of the status, and cheap enough to call once
    /// a minute.
    async fn unrouted_topics(&self) -> Result<Vec<UnroutedTopic>, StoreError>;

    /// How large the store is and how fast it grows, from what the database knows without counting, where it knows it.
    async fn vitals(&self) -> Result<Vitals, StoreError>;

    /// Remembers the sizes of now, so that growth can be told later. Once an hour at most: sooner, it does nothing.
    async fn note_sizes(&self) -> Result<(), StoreError>;

    /// Routes that have run, by name.
    async fn routes(&self) -> Result<Vec<ShownRoute>, StoreError>;

    /// Changes a route's settings; every relay uses them from its next read on. Returns the new settings; none: there is no
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

    /// Messages by filter, newest first, at most `limit`. Reads a bounded number of rows, and says if that cut the list.
    async fn messages(&self, filter: &MessageFilter, limit: i64) -> Result<Listed, StoreError>;

    /// One message with its payload; none: the store has no copy of it (any more).
    async fn message(&self, id: MessageId) -> Result<Option<StoredMessage>, StoreError>;

    /// Leaves an audit row that says who looked at the payload of this message, and why.
    async fn note_payload_read(&self, id: MessageId, deed: &Deed) -> Result<(), StoreError>;

    /// Removes a route that is no longer used, with its position, so that it no longer prevents a clean-up. Rejected while a relay runs
    /// it; without `discard` also while it has unsent or dead messages, which would be lost with it. `done` says whether it was removed.
    async fn forget_route(&self, route: &str, discard: bool, deed: &Deed) -> Result<Option<Forgotten>, StoreError>;

    /// Keys that wait, longest first, at most `limit`: of this route, or with [`Side::In`] of this consumer.
    async fn waiting_keys(&self, side: Side, of: Option<&str>, limit: i64) -> Result<Vec<WaitingKey>, StoreError>;

    /// Parks, unparks or skips a key of a route. False: there was nothing to do, and no audit row is written.
    ///
    /// Messages that a relay has already claimed of a parked key, at most its window, are still sent, in order.
    async fn act_on_key(&self, route: &str, key: &str, what: KeyDeed, deed: &Deed) -> Result<bool, StoreError>;

    /// Dead letters by filter, by route (or consumer) and seq, at most `limit`.
    async fn dead_letters(&self, side: Side, filter: &DeadFilter, limit: i64) -> Result<Vec<DeadLetter>, StoreError> {
        self.dead_letters_behind(None, side, filter, limit).await
    }

    /// The same, from behind `after` on.
    async fn dead_letters_behind(
        &self,
        after: Option<&DeadCursor>,
        side: Side,
        filter: &DeadFilter,
        limit: i64,
    ) -> Result<Vec<DeadLetter>, StoreError>;

    /// The payload of one dead letter; none: it no longer exists.
    async fn dead_payload(&self, side: Side, route: &str, seq: i64) -> Result<Option<Vec<u8>>, StoreError>;

    /// Gives dead letters back or deletes them, oldest first, at most `limit`. Returns the ones that were changed. A new dead
    /// letter that the route's position has not passed yet is not discarded: a crash would bring it back.
    ///
    /// A store may work in steps, each with an audit row; `progress` is called with the number done, and an error reports it too.
    async fn act_on_dead(
        &self,
        what: DeadDeed,
        side: Side,
        filter: &DeadFilter,
        limit: i64,
        deed: &Deed,
        progress: &mut (dyn FnMut(usize) + Send),
    ) -> Result<Vec<DeadLetter>, StoreError>;

    /// What dead letters died of, by route (or consumer) and seq, from behind `after` on, at most `limit`.
    async fn dead_headlines(
        &self,
        side: Side,
        after: Option<&DeadCursor>,
        limit: i64,
    ) -> Result<Vec<Headline>, StoreError>;

    /// What people wrote about these groups of dead letters, newest first.
    async fn dead_notes(&self, groups: &[String]) -> Result<Vec<(String, DeadNote)>, StoreError>;

    /// Writes something about a group of dead letters.
    async fn note_dead(&self, group: &str, note: &str, deed: &Deed) -> Result<(), StoreError>;

    /// Looks at what an operation would be about, a bounded number of rows further than the last look; changes nothing.
    async fn survey_operation(&self, operation: &NewOperation, survey: &mut Survey) -> Result<(), StoreError>;

    /// Begins an operation; [`step_operations`](Self::step_operations) carries it out. What is written, or dies, later is not meant.
    async fn begin_operation(&self, id: OperationId, operation: &NewOperation, deed: &Deed) -> Result<(), StoreError>;

    /// Operations, newest first, at most `limit`, or the one with this id.
    async fn operations(&self, id: Option<OperationId>, limit: i64) -> Result<Vec<ShownOperation>, StoreError>;

    /// What became, at each consumer of this database, of the messages that an operation gave out.
    async fn operation_effects(&self, id: OperationId) -> Result<Vec<OperationEffects>, StoreError>;

    /// Pauses, resumes or cancels an operation. False: it does not exist, or is in no state for that, and nothing was changed.
    async fn steer_operation(&self, id: OperationId, what: Steer, deed: &Deed) -> Result<bool, StoreError>;

    /// Looks what became of the messages that operations gave out, and does one step of each operation that goes on. Each step is one
    /// transaction, with an audit row; whoever dies in between leaves nothing half done. May be called by several processes at once.
    async fn step_operations(&self) -> Result<Stepped, StoreError>;

    /// Deletes the inbox rows of messages that were processed at least this long ago, in steps; `progress` is called with the number
    /// deleted so far. An age below the redelivery horizon is rejected.
    async fn prune_inbox(
        &self,
        older_than: Duration,
        deed: &Deed,
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<u64, StoreError>;

    /// Does one step of removing what is finished and old, in a transaction of its own that looks at a bounded number of rows, and moves
    /// `sweep` on. What is not finished is never removed, whatever its age. One process at a time does this: another one waits.
    async fn retain(&self, retention: &Retention, sweep: &mut Sweep) -> Result<Removed, StoreError>;
}
