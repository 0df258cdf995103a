//! A message on its way through the relay, and its outcome.

use std::sync::Arc;
use std::time::Duration;

use crate::message::{Message, MessageId};
use crate::operation::OperationId;
use crate::words::words;

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
    /// Attempts used up before this one.
    pub attempts: u32,
    /// Not due yet by the database's clock: the relay must park it, not publish it.
    pub scheduled: bool,
    /// Another message of its key was parked when this one was read: this one queues up behind it.
    pub behind: bool,
    /// Relays that died while this was the only message that they had with the sink, after the sink was seen to work.
    /// From the outbox it is not known before [`crate::Source::note`] tells.
    pub deaths: u32,
    /// The same, but before the sink was seen to work: an outage may have caused the deaths as well.
    pub doubts: u32,
    /// Why it can never be sent: its row could not be read completely. It becomes a dead letter.
    pub unreadable: Option<String>,
    /// The operation that sends it once more, after it had been sent. None as well where that operation is not known any more.
    pub replay: Option<OperationId>,
    /// The message itself; the sink gets this same copy.
    pub message: Arc<Message>,
}

/// Why a message is a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Its attempts are used up.
    Exhausted,
    /// The broker will never accept it.
    Permanent,
    /// It breaks the connection or kills the process that handles it.
    Poison,
}

words!(Cause { Exhausted => "exhausted", Permanent => "permanent", Poison => "poison" });

/// What to record about a delivery.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The broker confirmed it, or the sink is configured not to send it.
    Done,
    /// It waits for its next attempt; its key waits with it.
    Retry {
        /// Wait from now, by the database's clock.
        after: Duration,
        /// Attempts used up.
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
        /// Attempts used up.
        attempts: u32,
        /// Why.
        cause: Cause,
        /// For the operator.
        error: String,
        /// Its key waits until an operator decides.
        blocks_key: bool,
    },
    /// It has no outcome; a parked message goes back to where it was. Never used for a message from the outbox.
    Release,
}

/// The outcome of one delivery.
#[derive(Debug, Clone, PartialEq)]
pub struct Settlement {
    /// Which delivery.
    pub token: Token,
    /// Its outcome.
    pub outcome: Outcome,
}

/// Why a message is parked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParkedState {
    /// It waits for its next attempt, or it is the first of its key and can be sent.
    Retry,
    /// It waits behind another message of its key.
    Queued,
    /// It is not due yet.
    Scheduled,
}

words!(ParkedState { Retry => "retry", Queued => "queued", Scheduled => "scheduled" });

/// What an outcome changes in a store besides positions.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// A message from the outbox is parked.
    Park {
        /// Why.
        state: ParkedState,
        /// Attempts used up.
        attempts: u32,
        /// Wait from now, by the database's clock; a scheduled one waits as its row says.
        after: Duration,
        /// For the operator.
        error: Option<String>,
    },
    /// A parked message failed again.
    ParkAgain {
        /// Attempts used up.
        attempts: u32,
        /// Wait from now, by the database's clock.
        after: Duration,
        /// For the operator.
        error: String,
    },
    /// A message becomes a dead letter.
    Bury {
        /// Attempts used up.
        attempts: u32,
        /// Why.
        cause: Cause,
        /// For the operator.
        error: String,
        /// Its key waits until an operator decides.
        blocks_key: bool,
    },
    /// A parked message is done.
    Unpark,
}

impl Change {
    /// What an outcome changes; none if the position alone records it, or if a parked message stays as it is.
    pub fn of(outcome: &Outcome, parked: bool) -> Option<Self> {
        let park = |state| Self::Park { state, attempts: 0, after: Duration::ZERO, error: None };
        match outcome {
            Outcome::Done => parked.then_some(Self::Unpark),
            Outcome::Release => None,
            Outcome::Queue => (!parked).then(|| park(ParkedState::Queued)),
            Outcome::Schedule => (!parked).then(|| park(ParkedState::Scheduled)),
            Outcome::Retry { after, attempts, error } => {
                let (after, attempts, error) = (*after, *attempts, error.clone());
                Some(if parked {
                    Self::ParkAgain { attempts, after, error }
                } else {
                    Self::Park { state: ParkedState::Retry, attempts, after, error: Some(error) }
                })
            }
            Outcome::Dead { attempts, cause, error, blocks_key } => {
                Some(Self::Bury { attempts: *attempts, cause: *cause, error: error.clone(), blocks_key: *blocks_key })
            }
        }
    }
}

/// What a store must write about one delivery before a position passes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Its lane.
    pub lane: u16,
    /// The tenure in which it was read: in another tenure nothing is written.
    pub epoch: i64,
    /// Its place in the outbox.
    pub seq: i64,
    /// Its message.
    pub id: MessageId,
    /// Its key, if it waits for other messages of the key.
    pub key: Option<String>,
    /// Whether it is already parked.
    pub parked: bool,
    /// What happens to it.
    pub change: Change,
}
