//! The near end of the relay: where messages are claimed and outcomes are recorded.

use std::time::Duration;

use async_trait::async_trait;

use crate::delivery::{Delivery, Settlement, Token};
use crate::error::StoreError;
use crate::order::{OnDead, Order};

/// How much a relay wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    /// At most this many deliveries from the outbox, and as many parked ones.
    pub messages: usize,
    /// At most about this many bytes of payloads and headers; the first message comes whatever its size.
    pub bytes: usize,
    /// At most this many deliveries of one lane may be out or settled ahead of its position, so that one busy key cannot
    /// take every place.
    pub lane_messages_max: usize,
    /// Whether to look at parked messages too.
    pub parked: bool,
    /// At most one delivery in all.
    pub single: bool,
}

impl Want {
    /// So many messages, whatever their size, parked ones too.
    pub fn up_to(messages: usize) -> Self {
        Self { messages, bytes: usize::MAX, lane_messages_max: usize::MAX, parked: true, single: false }
    }
}

/// What a relay says about itself with a renewal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What it publishes to, for people, without secrets.
    pub sink: Option<String>,
    /// Why the sink is not published to now.
    pub sink_down: Option<String>,
    /// Why the sink takes nothing for now although its connection is up ([`crate::Sink::blocked`]). Nobody can die over a
    /// message that cannot be published: the note about the one that travels alone ([`Source::note`]) is taken off.
    pub sink_blocked: Option<String>,
    /// What killed the relays before this one, if it was a message, is behind it: their deaths count no more.
    pub survived: bool,
}

/// What is known of a message that is about to travel alone.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Noted {
    /// As in [`Delivery::deaths`].
    pub deaths: u32,
    /// As in [`Delivery::doubts`].
    pub doubts: u32,
    /// What was written: a death from now on counts against the message, and is not only a doubt.
    pub proven: bool,
}

/// A lane that this relay lost. It may hold the lane again by the time that this is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostLane {
    /// Its number.
    pub lane: u16,
    /// Deliveries of it with a token below this one are lost. Tokens only grow; later ones are of a newer tenure.
    pub before: Token,
}

/// What a claim brought.
#[derive(Debug, Default)]
pub struct Claimed {
    /// In order: within a lane, deliveries of one key are in the order in which they are to be published.
    pub deliveries: Vec<Delivery>,
    /// There is more to be had at once.
    pub more: bool,
    /// Lanes that this relay no longer holds. Deliveries of them are no longer its business.
    pub lost_lanes: Vec<LostLane>,
    /// As in [`Settled`].
    pub unwritten: bool,
}

/// What a settling changed.
#[derive(Debug, Default)]
pub struct Settled {
    /// Lanes that were lost: nothing was recorded for them. Losing a lease is data, not an error, and never success.
    pub lost_lanes: Vec<LostLane>,
    /// Settlements that changed nothing because their lane was lost.
    pub fenced: usize,
    /// A key has become free whose parked messages can be claimed at once.
    pub more_parked: bool,
    /// Deliveries settled so far that the stored position has not passed, because an older one is open or because it is not
    /// written yet: a crash repeats these too, so they count as in flight.
    pub settled_ahead: usize,
    /// A position was reached and is not written yet: [`Source::settle`] is to be called again soon, with nothing if there is
    /// nothing.
    pub unwritten: bool,
}

/// How a relay stands with its route.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Lanes held after the call.
    pub held: usize,
    /// Lanes lost since the last call.
    pub lost_lanes: Vec<LostLane>,
    /// As in [`Settled`]; what a lost lane had is not counted any more.
    pub settled_ahead: usize,
    /// Relays in a row that died holding one of these lanes, none of them having survived what it claimed.
    pub deaths: u32,
    /// Order within a key, as the store has it for the route; it counts more than what the relay was started with.
    pub order: Option<Order>,
    /// What becomes of a key whose message is dead, likewise.
    pub on_dead: Option<OnDead>,
}

/// Claims messages of one route and records what became of them.
///
/// Guarantees, on every implementation (the conformance suite of `postroom-testkit` checks them):
/// - a committed message is handed out at least once, and again after a restart until it is settled;
/// - a message that was rolled back is never handed out;
/// - while the lease holds, no message is handed out twice;
/// - within a key, messages are handed out in the order in which their transactions took the key's row lock;
/// - a settlement of a lost lane changes nothing and is reported as fenced.
#[async_trait]
pub trait Source: Send + Sync {
    /// Acquires free or expired lanes and extends the lease on those held. Called every third of [`Source::lease`];
    /// local deadlines are taken before the call is sent, so they only make the relay give up earlier.
    async fn renew(&self, report: &Report) -> Result<Standing, StoreError>;

    /// Hands out up to `want` deliveries of the lanes held.
    async fn claim(&self, want: Want) -> Result<Claimed, StoreError>;

    /// Notes durably that this delivery is about to be the only one with the sink, so that the next relay is told should this
    /// one die over it, and says what is known of it. With `proven` the sink was seen to work: a death counts against the
    /// message ([`Delivery::deaths`]). Without, it may as well be an outage, and raises a doubt only ([`Delivery::doubts`]).
    /// Settling the delivery takes the note off; when it is through, everything known of it is forgotten.
    ///
    /// Default, for stores that keep no such notes: nothing is known.
    async fn note(&self, token: Token, proven: bool) -> Result<Noted, StoreError> {
        let _ = token;
        Ok(Noted { proven, ..Noted::default() })
    }

    /// Takes the note off, because its message came back without an outcome and something else is about to go out: a relay that
    /// dies now did not die over that message.
    ///
    /// Default, for stores that keep no such notes.
    async fn clear_note(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Records outcomes, and writes positions when it is time to: seldom enough that a snapshot held open somewhere does not make
    /// them dear. May be called again with the same settlements after an error: it repeats nothing.
    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled, StoreError>;

    /// Gives the lanes back, so that another relay can take them at once.
    async fn release(&self) -> Result<(), StoreError>;

    /// How long a lease lasts without renewal.
    fn lease(&self) -> Duration;
}
