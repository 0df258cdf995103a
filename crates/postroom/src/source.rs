//! The store's side of the relay: where messages are claimed and outcomes are recorded.

use std::time::Duration;

use async_trait::async_trait;

use crate::delivery::{Delivery, Settlement, Token};
use crate::error::StoreError;
use crate::order::{OnDead, Order};

/// How much a relay asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    /// At most this many deliveries from the outbox, and as many parked ones.
    pub messages: usize,
    /// Approximate limit on the bytes of payloads and headers; the first message is handed out whatever its size.
    pub bytes: usize,
    /// At most this many deliveries of one lane may be handed out or settled ahead of its position, so that one busy key cannot
    /// use up the whole window.
    pub lane_messages_max: usize,
    /// Whether to look at parked messages too.
    pub parked: bool,
    /// At most one delivery in all.
    pub single: bool,
}

impl Want {
    /// This many messages, whatever their size, parked ones too.
    pub fn up_to(messages: usize) -> Self {
        Self { messages, bytes: usize::MAX, lane_messages_max: usize::MAX, parked: true, single: false }
    }
}

/// What a relay reports about itself with a renewal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What it publishes to, for people, without secrets.
    pub sink: Option<String>,
    /// Why nothing is published to the sink now.
    pub sink_down: Option<String>,
    /// Why the sink accepts nothing for now although its connection is up ([`crate::Sink::blocked`]). No message that
    /// cannot be published can kill a relay: the note about the one that is published alone ([`Source::note`]) is cleared.
    pub sink_blocked: Option<String>,
    /// This relay got past what killed the relays before it, if it was a message: their deaths no longer count.
    pub survived: bool,
}

/// What is known about a message that is about to be published alone.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Noted {
    /// As in [`Delivery::deaths`].
    pub deaths: u32,
    /// As in [`Delivery::doubts`].
    pub doubts: u32,
    /// What was recorded: a death from now on counts against the message, and is not only a doubt.
    pub proven: bool,
}

/// A lane that this relay lost. It may hold the lane again by the time that this is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostLane {
    /// Its number.
    pub lane: u16,
    /// Deliveries of it with a token below this one are lost. Tokens only grow; later ones are of a newer tenure.
    pub before: Token,
}

/// The result of a claim.
#[derive(Debug, Default)]
pub struct Claimed {
    /// In order: within a lane, deliveries of one key are in the order in which they are to be published.
    pub deliveries: Vec<Delivery>,
    /// More messages are available at once.
    pub more: bool,
    /// Lanes that this relay no longer holds. It must not act on their deliveries any more.
    pub lost_lanes: Vec<LostLane>,
    /// As in [`Settled`].
    pub unwritten: bool,
}

/// What a call of [`Source::settle`] changed.
#[derive(Debug, Default)]
pub struct Settled {
    /// Lanes that were lost: nothing was recorded for them. Losing a lease is data, not an error, and never success.
    pub lost_lanes: Vec<LostLane>,
    /// Settlements that changed nothing because their lane was lost.
    pub fenced: usize,
    /// A key has become free, and its parked messages can be claimed at once.
    pub more_parked: bool,
    /// Deliveries settled so far that the stored position has not passed, because an older one is open or because it is not
    /// written yet: a crash repeats these too, so they count as in flight.
    pub settled_ahead: usize,
    /// A position was reached and is not saved yet: call [`Source::settle`] again soon, with no settlements if there are
    /// none.
    pub unwritten: bool,
}

/// What a relay holds of its route.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Lanes held after the call.
    pub held: usize,
    /// Lanes lost since the last call.
    pub lost_lanes: Vec<LostLane>,
    /// As in [`Settled`]; the deliveries of a lost lane no longer count.
    pub settled_ahead: usize,
    /// Relays in a row that died while they held one of these lanes, without surviving what they had claimed.
    pub deaths: u32,
    /// Order within a key, as stored for the route; it overrides what the relay was started with.
    pub order: Option<Order>,
    /// What happens to a key after a dead letter, likewise.
    pub on_dead: Option<OnDead>,
}

/// Claims messages of one route and records their outcomes.
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
    /// local deadlines start before the call is sent, so they can only make the relay give up earlier.
    async fn renew(&self, report: &Report) -> Result<Standing, StoreError>;

    /// Hands out up to `want` deliveries of the lanes held.
    async fn claim(&self, want: Want) -> Result<Claimed, StoreError>;

    /// Notes durably that this delivery is about to be the only one with the sink, so that the next relay knows if this
    /// relay dies over it, and returns what is known of it. With `proven` the sink was seen to work: a death counts against the
    /// message ([`Delivery::deaths`]). Without, it may also be an outage, and only raises a doubt ([`Delivery::doubts`]).
    /// Settling the delivery clears the note; when the delivery is done, everything known of it is forgotten.
    ///
    /// Default, for stores that keep no such notes: nothing is known.
    async fn note(&self, token: Token, proven: bool) -> Result<Noted, StoreError> {
        let _ = token;
        Ok(Noted { proven, ..Noted::default() })
    }

    /// Clears the note, because its message came back without an outcome and another message is about to be published: a relay that
    /// dies now did not die over that message.
    ///
    /// Default, for stores that keep no such notes.
    async fn clear_note(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Records outcomes, and saves positions when it is time to: rarely enough that they stay cheap while some transaction keeps an
    /// old snapshot open. May be called again with the same settlements after an error: it repeats nothing.
    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled, StoreError>;

    /// Gives the lanes back, so that another relay can take them at once.
    async fn release(&self) -> Result<(), StoreError>;

    /// How long a lease lasts without renewal.
    fn lease(&self) -> Duration;
}
