//! The receiving side of a broker.

use async_trait::async_trait;

use crate::error::Unavailable;
use crate::message::{Message, MessageId};

/// A message as a broker handed it out.
#[derive(Debug, Clone)]
pub struct Received {
    /// Names this delivery towards the broker; meaningless after a reconnect.
    pub tag: u64,
    /// The connection it came on, so that a late acknowledgement cannot settle another delivery.
    pub session: u64,
    /// The broker says that it may have handed this out before.
    pub redelivered: bool,
    /// The message; `None` where the broker's message carries no message id (it was not written by postroom).
    pub id: Option<MessageId>,
    /// Body and properties as far as they could be read.
    pub message: Message,
}

/// Receives from one queue. Each delivery is acked, requeued or rejected once; what is not comes again.
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

    /// The next message; waits for one. Reconnects on the next call after an error.
    async fn receive(&self) -> Result<Received, Unavailable>;

    /// Settles a delivery: the broker forgets it.
    async fn ack(&self, received: &Received) -> Result<(), Unavailable>;

    /// Gives a delivery back, to be handed out again.
    async fn requeue(&self, received: &Received) -> Result<(), Unavailable>;

    /// Refuses a delivery for good; the broker drops it or dead-letters it, by its own configuration.
    async fn reject(&self, received: &Received) -> Result<(), Unavailable>;
}
