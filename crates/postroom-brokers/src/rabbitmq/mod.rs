//! RabbitMQ over AMQP 0-9-1: publisher confirms, mandatory and persistent publishing to a durable topic exchange.
//!
//! - A message counts as stored when the broker confirmed it *and* did not return it as unroutable.
//! - The client library attaches a `basic.return` to whichever confirm comes next, not to the returned message's. So the
//!   sink waits for all confirms of a batch, collects the returns from all of them, matches them by message id, and only
//!   then judges (docs/decisions/0004).
//! - Every wait has the sink's own deadline; what has no answer then is *unknown* and is published again with the same id.
//! - The client's auto-recovery stays off: it leaves confirms pending for ever. A broken connection is replaced as a whole.
//! - What a broker sends passes a fence before the client sees it: some bytes would end the process or block the queue.

mod check;
mod content_header;
mod fence;
mod properties;
mod sink;
mod subscription;
mod transport;
mod unsettled;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties};
use postroom::{Sink, Subscription, Unavailable, redact_url};
use serde::Deserialize;

use crate::tls::{self, TlsFiles};
use crate::{Broker, CheckFailed, OpenSinkError, OpenSubscriptionError, Section, SinkOptions, SubscriptionOptions};

pub use sink::RabbitmqSink;
pub use subscription::{Binding, RabbitmqSubscription, RabbitmqSubscriptionOptions};

/// Heartbeat in seconds: a silent peer is noticed after two of them.
const HEARTBEAT_SECONDS: u16 = 5;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Smallest `frame_max` that a URL may ask for: all properties of a message travel in one frame, headers of 16 KiB included; what is
/// larger needs the default.
const FRAME_MAX_MIN: u32 = 32_768;

/// `[routes.sink]` with `kind = "rabbitmq"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RabbitmqOptions {
    /// `amqp://` or `amqps://` URL. Certificates are verified against the system's roots and what `cacertfile` in the URL names;
    /// `certfile` and `keyfile` are a client certificate.
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

/// RabbitMQ.
pub const BROKER: Broker = Broker {
    kind: "rabbitmq",
    about: "RabbitMQ over AMQP 0-9-1: publisher confirms to a durable topic exchange, manual acks from a queue",
    sink: Some(Section::sink::<RabbitmqOptions>(
        "kind = \"rabbitmq\"\nurl = \"amqp://guest:guest@localhost:5672/%2f\"\nexchange = \"postroom\"\n",
    )),
    subscription: Some(Section::subscription::<RabbitmqSubscriptionOptions>(
        "kind = \"rabbitmq\"\nurl = \"amqp://guest:guest@localhost:5672/%2f\"\nqueue = \"billing\"\n",
    )),
};

#[async_trait]
impl SinkOptions for RabbitmqOptions {
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        warn_if_in_clear(&self.url);
        Ok(Arc::new(RabbitmqSink::new(self.clone())?))
    }

    fn shown(&self) -> String {
        format!("rabbitmq {}", redact_url(&self.url))
    }

    async fn check(&self) -> Result<String, CheckFailed> {
        check::exchange(self).await
    }
}

#[async_trait]
impl SubscriptionOptions for RabbitmqSubscriptionOptions {
    fn open(&self, _: &str) -> Result<Arc<dyn Subscription>, OpenSubscriptionError> {
        Ok(Arc::new(RabbitmqSubscription::new(self.clone())?.exclusive()))
    }

    fn shown(&self) -> String {
        format!("queue {:?} of rabbitmq {}", self.queue, redact_url(&self.url))
    }

    fn takes_from(&self) -> String {
        self.shown()
    }

    async fn check(&self, _: &[String]) -> Result<String, CheckFailed> {
        check::queue(self).await
    }
}

impl RabbitmqOptions {
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
        let wrong = |problem| OpenSinkError { kind: "rabbitmq", problem };
        uri(&self.url).and_then(|(_, files)| files.read()).map_err(wrong)?;
        usable_name("exchange", &self.exchange).map_err(wrong)?;
        if self.channels == 0 || self.batch_messages_max == 0 || self.publish_deadline_seconds == 0 {
            let problem = "channels, batch_messages_max and publish_deadline_seconds must be at least 1";
            return Err(wrong(problem.to_owned()));
        }
        Ok(())
    }
}

/// The URL with our heartbeat and frame size unless it has its own, and its files for TLS; or what is wrong with it, without its
/// password.
fn uri(url: &str) -> Result<(AMQPUri, TlsFiles), String> {
    let shown = redact_url(url);
    if !url.starts_with("amqp://") && !url.starts_with("amqps://") {
        return Err(format!("url {shown} must begin with amqp:// or amqps://"));
    }
    let (rest, files) = TlsFiles::taken_out_of(url, "amqps://")?;
    // The client's own words may quote a password that is not percent-encoded.
    let mut uri: AMQPUri = rest.parse().map_err(|_| {
        format!(
            "url {shown} cannot be parsed; write amqp://USER:PASSWORD@HOST:PORT/VHOST, with special characters of user, password and \
             virtual host percent-encoded (/ as %2f, @ as %40, : as %3a)"
        )
    })?;
    usable_name("virtual host in url", &uri.vhost)?;
    // Without a size of ours the client would take any that the broker names, and allocate a multiple of it.
    let frame_max = *uri.query.frame_max.get_or_insert(fence::FRAME_MAX_DEFAULT);
    if !(FRAME_MAX_MIN..=fence::FRAME_MAX_MAX).contains(&frame_max) {
        let max = fence::FRAME_MAX_MAX;
        return Err(format!("frame_max={frame_max} in url {shown} must be between {FRAME_MAX_MIN} and {max}"));
    }
    uri.query.heartbeat.get_or_insert(HEARTBEAT_SECONDS);
    Ok((uri, files))
}

/// Says once for each link that passwords and messages travel in clear to another machine.
fn warn_if_in_clear(url: &str) {
    let Ok((parsed, _)) = uri(url) else { return };
    let host = parsed.authority.host.as_str();
    let here = host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if parsed.scheme == lapin::uri::AMQPScheme::AMQP && !here {
        tracing::warn!("the connection to RabbitMQ at {} is not encrypted; use amqps://", redact_url(url));
    }
}

/// AMQP carries names as short strings. RabbitMQ removes line breaks from a name that it declares and not from one that it looks for.
fn usable_name(what: &str, name: &str) -> Result<(), String> {
    if name.chars().any(char::is_control) {
        return Err(format!("{what}: the name contains a control character; use letters, digits and punctuation"));
    }
    if name.len() > 255 {
        return Err(format!("{what}: the name has {} bytes, and AMQP allows 255; choose a shorter one", name.len()));
    }
    Ok(())
}

/// Opens a connection.
async fn connect(url: &str, name: &str, unsettled_bytes_max: Option<u64>) -> Result<Connection, Unavailable> {
    let shown = || format!("RabbitMQ at {}", redact_url(url));
    let problem = |problem| Unavailable::new(shown(), problem);
    let (uri, files) = uri(url).map_err(problem)?;
    let parts = files.read().map_err(problem)?;
    let identity =
        parts.identity.map(|(pem, key)| OwnedIdentity::PKCS8 { pem: pem.into_bytes(), key: key.into_bytes() });
    let tls = OwnedTLSConfig { identity, cert_chain: parts.root };
    let frame_max = uri.query.frame_max.unwrap_or(fence::FRAME_MAX_DEFAULT);
    let limits = transport::Limits { frame_max, unsettled_bytes_max };
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    match tokio::time::timeout(CONNECT_TIMEOUT, transport::connect(uri, tls, properties, limits)).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => {
            let told = format!("{error}{}", tls::hint(&format!("{error} {error:?}")));
            Err(Unavailable::new(shown(), told))
        }
        Err(elapsed) => Err(Unavailable::new(shown(), elapsed)),
    }
}
