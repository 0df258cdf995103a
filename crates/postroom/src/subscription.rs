//! The receiving side of a broker.

use std::time::Duration;

use async_trait::async_trait;

use crate::error::Unavailable;
use crate::message::{Message, MessageId};

/// Identifies a delivery to the subscription that handed it out, which finds by it what the broker needs to know (a delivery tag, a
/// receipt, an offset).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Receipt {
    session: u64,
    number: u64,
}

impl Receipt {
    /// For subscriptions: delivery `number` of `session`. No two sessions of a process share a number, so that a late answer
    /// cannot settle the delivery of another.
    pub fn new(session: u64, number: u64) -> Self {
        Self { session, number }
    }

    /// The session that it was handed out in.
    pub fn session(self) -> u64 {
        self.session
    }

    /// Which delivery of that session it is.
    pub fn number(self) -> u64 {
        self.number
    }
}

/// A part of the source that is handed out to one subscription at a time, where the broker has such parts; 0 where it has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Partition(pub u32);

/// A message as a broker handed it out.
#[derive(Debug, Clone)]
pub struct Received {
    /// Names this delivery.
    pub receipt: Receipt,
    /// Where it came from within the source.
    pub partition: Partition,
    /// The broker says that it may have handed this out before.
    pub redelivered: bool,
    /// The message id; `None` if the broker's message carries none (it was not written by postroom).
    pub id: Option<MessageId>,
    /// Body and properties as far as they could be read.
    pub message: Message,
}

/// How much to take at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// At most this many messages.
    pub messages: usize,
    /// Approximate limit on the bytes of payloads; the first message is taken whatever its size.
    pub bytes: usize,
}

/// What a subscription brings.
#[derive(Debug)]
pub enum Arrival {
    /// Messages in the order of the source; at least one.
    Messages(Vec<Received>),
    /// Another process has this partition now. Its unsettled deliveries are handed out there: drop those whose handling has not
    /// begun; none of them can be settled here any more.
    Revoked(Partition),
}

/// What happens to a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The broker forgets it.
    Ack,
    /// It is handed out again.
    Requeue,
    /// The broker drops it or dead-letters it, by its own configuration.
    Reject,
}

/// Receives from one source of one broker. Each delivery is settled once; one that is not settled is handed out again.
///
/// Guarantees, on every implementation (the conformance suite of `postroom-testkit` checks them):
/// - a delivery is handed out again, here or elsewhere, until it was settled;
/// - what was acked or rejected is not delivered again after the broker has recorded it;
/// - the number of unsettled deliveries never exceeds the limit of the subscription;
/// - a receipt of another session, or one that was settled, settles nothing else.
#[async_trait]
pub trait Subscription: Send + Sync {
    /// Its broker's name in traces, `messaging.system` in OpenTelemetry's words.
    fn system(&self) -> &'static str {
        "unknown"
    }

    /// Where its messages come from, for people, such as `queue "billing"`.
    fn origin(&self) -> String {
        format!("a queue of {}", self.system())
    }

    /// Whether messages can come in now, as far as this end of the connection knows. Default, for what is always there.
    fn is_connected(&self) -> bool {
        true
    }

    /// How long a delivery may stay unsettled before the broker takes it back, unless it is extended; none: as long as the
    /// session lasts.
    fn lease(&self) -> Option<Duration> {
        None
    }

    /// Waits for the next messages. Reconnects on the next call after an error. Dropping the future loses nothing.
    async fn receive(&self, max: Bound) -> Result<Arrival, Unavailable>;

    /// Settles deliveries. After an error it is not known which were settled: the others are delivered again.
    async fn settle(&self, answers: &[(Receipt, Answer)]) -> Result<(), Unavailable>;

    /// Keeps deliveries for another [`Subscription::lease`]. Default, for brokers that hold them as long as the session lasts.
    async fn extend(&self, receipts: &[Receipt]) -> Result<(), Unavailable> {
        let _ = receipts;
        Ok(())
    }

    /// Ends the session: unsettled deliveries go back to the broker, in the order of the source if the broker keeps one.
    async fn close(&self);
}
