//! The far end of the relay: where messages are published.

use std::sync::Arc;

use async_trait::async_trait;

use crate::error::Unavailable;
use crate::message::Message;
use crate::verdict::Verdicts;

/// Messages published together, in this order. With [`crate::Order::Key`] no two of them share a key; with
/// [`crate::Order::Pipelined`] they may, and no other batch under way holds that key.
#[derive(Debug)]
pub struct Batch {
    messages: Vec<Arc<Message>>,
}

impl Batch {
    /// A batch of these messages.
    pub fn new<M: Into<Arc<Message>>>(messages: impl IntoIterator<Item = M>) -> Self {
        Self { messages: messages.into_iter().map(Into::into).collect() }
    }

    /// The messages.
    pub fn messages(&self) -> &[Arc<Message>] {
        &self.messages
    }

    /// The unjudged batch: every message *unknown*.
    pub fn silent(&self) -> Verdicts {
        Verdicts::silent(self.messages.len())
    }
}

/// How a sink likes to be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkLimits {
    /// Most messages in a batch.
    pub batch_messages_max: usize,
    /// About as many bytes of payloads and headers in a batch; one message may be larger.
    pub batch_bytes_max: usize,
    /// Most batches under way at once.
    pub batches_in_flight_max: usize,
}

/// Publishes batches to one broker and judges each message. It never retries: that is the policy's business.
///
/// Guarantees: a message is judged `Stored` only after the broker's positive confirm of this very message; every
/// `publish` ends within the sink's own deadline; dropping the future leaves nothing behind that a later call trips over.
#[async_trait]
pub trait Sink: Send + Sync {
    /// Its name in traces, `messaging.system` in OpenTelemetry's words.
    fn system(&self) -> &'static str {
        "unknown"
    }

    /// How it likes to be called.
    fn limits(&self) -> SinkLimits;

    /// Publishes and judges. `Unavailable` says that no message of the batch was judged and none may be assumed stored.
    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable>;

    /// Connects if need be, and says whether publishing has a chance.
    async fn probe(&self) -> Result<(), Unavailable>;

    /// Why it takes nothing for now although its connection is up (an alarm of the broker); none: it takes messages, or nobody
    /// knows. Asked often; it must not wait.
    fn blocked(&self) -> Option<String> {
        None
    }

    /// Closes connections; what is under way ends as `Unknown` or `Unavailable`.
    async fn close(&self);
}
