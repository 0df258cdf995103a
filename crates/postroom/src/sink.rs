//! The destination of a relay: where messages are published.

use std::sync::Arc;

use async_trait::async_trait;

use crate::error::Unavailable;
use crate::message::Message;
use crate::operation::OperationId;
use crate::verdict::Verdicts;

/// Messages published together, in this order. With [`crate::Order::Key`] no two of them share a key; with
/// [`crate::Order::Pipelined`] they may, and no other batch in progress contains that key.
#[derive(Debug)]
pub struct Batch {
    messages: Vec<Arc<Message>>,
    ways: Vec<Way>,
}

/// How a message came to be published, for sinks that recognise what they have stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Way {
    /// Its lane: relays that share a route have different lanes. The lane of a message does not change.
    pub lane: u16,
    /// The operation that sends it once more, although it was sent.
    pub replay: Option<OperationId>,
}

impl Batch {
    /// A batch of these messages.
    pub fn new<M: Into<Arc<Message>>>(messages: impl IntoIterator<Item = M>) -> Self {
        Self::of(messages.into_iter().map(|message| (message.into(), Way::default())))
    }

    /// A batch of these messages, each with its way.
    pub fn of(messages: impl IntoIterator<Item = (Arc<Message>, Way)>) -> Self {
        let (messages, ways) = messages.into_iter().unzip();
        Self { messages, ways }
    }

    /// How each message came, in the same order.
    pub fn ways(&self) -> &[Way] {
        &self.ways
    }

    /// The messages.
    pub fn messages(&self) -> &[Arc<Message>] {
        &self.messages
    }

    /// The verdicts before anything is known: every message *unknown*.
    pub fn silent(&self) -> Verdicts {
        Verdicts::silent(self.messages.len())
    }
}

/// How many messages a sink accepts at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkLimits {
    /// Most messages in a batch.
    pub batch_messages_max: usize,
    /// Approximate limit on the bytes of payloads and headers in a batch; a single message may be larger.
    pub batch_bytes_max: usize,
    /// Most batches in progress at once.
    pub batches_in_flight_max: usize,
}

/// Publishes batches to one broker and judges each message. It never retries: the retry policy decides that.
///
/// Guarantees: a message is judged `Stored` only after the broker's positive confirm of this very message; every
/// `publish` ends within the sink's own deadline; dropping the future leaves nothing behind that disturbs a later call.
#[async_trait]
pub trait Sink: Send + Sync {
    /// Its name in traces, `messaging.system` in OpenTelemetry's words.
    fn system(&self) -> &'static str {
        "unknown"
    }

    /// How many messages it accepts at once.
    fn limits(&self) -> SinkLimits;

    /// Publishes and judges. `Unavailable` means that no message of the batch was judged, and none may be assumed stored.
    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable>;

    /// Connects if necessary, and checks whether publishing is possible.
    async fn probe(&self) -> Result<(), Unavailable>;

    /// Why it accepts nothing for now although its connection is up (an alarm of the broker); none: it accepts messages, or it is not
    /// known. Called often; it must not wait.
    fn blocked(&self) -> Option<String> {
        None
    }

    /// Why the connection that it had is gone; none: it has one, has not connected yet, or needs none. Called often; it must not
    /// wait. A relay with nothing to publish learns in this way that its broker is away.
    fn disconnected(&self) -> Option<String> {
        None
    }

    /// Closes connections; publishing in progress ends as `Unknown` or `Unavailable`.
    async fn close(&self);
}
