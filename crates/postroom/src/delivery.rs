//! A message on its way through the relay, and what became of it.

use std::time::Duration;

use crate::message::Message;

/// Names a delivery within the source that handed it out; meaningless anywhere else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub u64);

/// Where a delivery was read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// From the outbox, on its first way out.
    Outbox,
    /// From the parked messages.
    Parked,
}

/// One message, claimed by a relay.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// Names this claim.
    pub token: Token,
    /// Lane that the message belongs to; a lost lease takes all deliveries of a lane with it.
    pub lane: u16,
    /// Where it was read from.
    pub origin: Origin,
    /// Attempts burned before this one.
    pub attempts: u32,
    /// Not due yet by the database's clock: to be parked, not published.
    pub scheduled: bool,
    /// Another message of its key was parked when this one was read: it queues up behind it.
    pub behind: bool,
    /// Relays that died while this was the only message that they had with the sink, after the sink was seen to work.
    /// From the outbox it is not known before [`crate::Source::note`] tells.
    pub deaths: u32,
    /// The same before the sink was seen to work: an outage may have had the same end.
    pub doubts: u32,
    /// The message itself.
    pub message: Message,
}

/// Why a message is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Its attempts are used up.
    Exhausted,
    /// The broker will never take it.
    Permanent,
    /// It harms whoever handles it.
    Poison,
}

impl Cause {
    /// The word in the table and on the screen.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Exhausted => "exhausted",
            Self::Permanent => "permanent",
            Self::Poison => "poison",
        }
    }
}

/// What is to be recorded about a delivery.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The broker confirmed it, or the sink does not want it.
    Done,
    /// It waits for its next attempt; its key waits with it.
    Retry {
        /// Wait from now, by the database's clock.
        after: Duration,
        /// Attempts burned.
        attempts: u32,
        /// For the operator.
        error: String,
    },
    /// It queues up behind a parked message of its key.
    Queue,
    /// It waits until it is due.
    Schedule,
    /// It becomes a dead letter.
    Dead {
        /// Attempts burned.
        attempts: u32,
        /// Why.
        cause: Cause,
        /// For the operator.
        error: String,
        /// Its key waits until an operator decides.
        blocks_key: bool,
    },
    /// Nothing became of it; a parked message goes back to where it was. Never used for a message from the outbox.
    Release,
}

/// The outcome of one delivery.
#[derive(Debug, Clone, PartialEq)]
pub struct Settlement {
    /// Which delivery.
    pub token: Token,
    /// What became of it.
    pub outcome: Outcome,
}
