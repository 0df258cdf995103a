//! RabbitMQ over AMQP 0-9-1: publisher confirms, mandatory and persistent publishing to a durable topic exchange.
//!
//! - A message counts as stored when the broker confirmed it *and* did not return it as unroutable.
//! - The client library attaches a `basic.return` to whichever confirm comes next, not to the returned message's. So the
//!   sink waits for all confirms of a batch, collects the returns from all of them, matches them by message id, and only
//!   then judges (docs/decisions/0004).
//! - Every wait has the sink's own deadline; what is open then is *unknown* and goes out again with the same id.
//! - The client's auto-recovery stays off: it leaves confirms pending for ever. A broken connection is replaced whole.

mod properties;
mod sink;
mod subscription;

use std::time::Duration;

use lapin::{Connection, ConnectionProperties};
use postroom::{Unavailable, redact_url};
use serde::Deserialize;

use crate::OpenSinkError;

pub use sink::RabbitmqSink;
pub use subscription::{Binding, RabbitmqSubscription, RabbitmqSubscriptionOptions};

/// Heartbeat in seconds: a silent peer is noticed after two of them.
const HEARTBEAT_SECONDS: u16 = 5;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// `[routes.sink]` with `kind = "rabbitmq"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RabbitmqOptions {
    /// `amqp://` or `amqps://` URL; certificates are verified against the system's roots.
    pub url: String,
    /// The topic exchange; `postroom` by default.
    #[serde(default = "default_exchange")]
    pub exchange: String,
    /// Declare the exchange (durable, topic) when connecting; true by default. Otherwise it is only checked to exist.
    #[serde(default = "default_true")]
    pub declare: bool,
    /// Channels that take turns; 4 by default.
    #[serde(default = "default_channels")]
    pub channels: usize,
    /// Most messages published before their confirms are awaited, per channel; 250 by default.
    #[serde(default = "default_batch")]
    pub batch_messages_max: usize,
    /// Seconds after which an unconfirmed message counts as unknown; 30 by default.
    #[serde(default = "default_deadline")]
    pub publish_deadline_seconds: u64,
}

impl std::fmt::Debug for RabbitmqOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RabbitmqOptions")
            .field("url", &redact_url(&self.url))
            .field("exchange", &self.exchange)
            .finish_non_exhaustive()
    }
}

fn default_exchange() -> String {
    "postroom".to_owned()
}

fn default_true() -> bool {
    true
}

fn default_channels() -> usize {
    4
}

fn default_batch() -> usize {
    250
}

fn default_deadline() -> u64 {
    30
}

impl RabbitmqOptions {
    pub(crate) const KEYS: &'static [&'static str] =
        &["kind", "url", "exchange", "declare", "channels", "batch_messages_max", "publish_deadline_seconds"];

    /// The defaults for a broker at `url`.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            exchange: default_exchange(),
            declare: true,
            channels: default_channels(),
            batch_messages_max: default_batch(),
            publish_deadline_seconds: default_deadline(),
        }
    }

    fn check(&self) -> Result<(), OpenSinkError> {
        let problem = if !self.url.starts_with("amqp://") && !self.url.starts_with("amqps://") {
            format!("url {} wants amqp:// or amqps://", redact_url(&self.url))
        } else if self.exchange.len() > 255 {
            "the name of the exchange has more than 255 bytes".to_owned()
        } else if self.channels == 0 || self.batch_messages_max == 0 || self.publish_deadline_seconds == 0 {
            "channels, batch_messages_max and publish_deadline_seconds want to be at least 1".to_owned()
        } else {
            return Ok(());
        };
        Err(OpenSinkError { kind: "rabbitmq", problem })
    }
}

/// Opens a connection with our heartbeat unless the URL names one.
async fn connect(url: &str, name: &str) -> Result<Connection, Unavailable> {
    let shown = || format!("RabbitMQ at {}", redact_url(url));
    let separator = if url.contains('?') { '&' } else { '?' };
    let with_heartbeat = if url.contains("heartbeat=") {
        url.to_owned()
    } else {
        format!("{url}{separator}heartbeat={HEARTBEAT_SECONDS}")
    };
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    match tokio::time::timeout(CONNECT_TIMEOUT, Connection::connect(&with_heartbeat, properties)).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => Err(Unavailable::new(shown(), error)),
        Err(elapsed) => Err(Unavailable::new(shown(), elapsed)),
    }
}
