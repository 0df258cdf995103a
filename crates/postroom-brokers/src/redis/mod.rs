//! Redis Streams, of Redis 7 or newer and Valkey: publishing with confirmations, and receiving from a place that a consumer group keeps.
//!
//! - A message counts as stored when the server answered with its entry's id and, where that is asked for, said that its disk or so many
//!   replicas have it.
//! - A connection never comes back by itself (docs/decisions/0036).
//! - A subscription reads streams by itself and keeps its place in a consumer group, so that nothing is handed out twice at a time and
//!   everything comes in the order of the stream (docs/decisions/0041).

mod address;
mod check;
mod connection;
mod entry;
mod note;
mod resp;
mod session;
mod sink;
mod subscription;

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Sink, Subscription, redact_url};
use serde::Deserialize;

use crate::template::Template;
use crate::{
    Broker, CheckFailed, Hazard, OpenSinkError, OpenSubscriptionError, Section, SinkOptions, SubscriptionOptions,
};

use address::Address;

pub use sink::RedisSink;
pub use subscription::{RedisSubscription, RedisSubscriptionOptions};

/// `[routes.sink]` with `kind = "redis"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RedisOptions {
    /// `redis://` or, for TLS, `rediss://` URL. Certificates are verified against the system's roots and what `cacertfile` in the URL
    /// names; `certfile` and `keyfile` are a client certificate.
    pub url: String,
    /// The stream that messages are added to; fields of a message in braces.
    pub stream: String,
    /// How many replicas must have a message before it counts as stored (`WAIT`); 0.
    #[serde(default)]
    pub replicas: u32,
    /// Whether the server's disk must have a message before it counts as stored (`WAITAOF`, of Redis 7.2); with `replicas`, those of the
    /// replicas too. False.
    #[serde(default)]
    pub synced: bool,
    /// Most messages of a batch; 500 by default.
    #[serde(default = "default_batch")]
    pub batch_messages_max: usize,
    /// Most batches whose confirmations are awaited; 4 by default.
    #[serde(default = "default_batches")]
    pub batches_in_flight_max: usize,
    /// Seconds after which an unconfirmed message counts as unknown; 30 by default.
    #[serde(default = "default_deadline")]
    pub publish_deadline_seconds: u64,
}

impl std::fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisOptions")
            .field("url", &redact_url(&self.url))
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

fn default_batch() -> usize {
    500
}

fn default_batches() -> usize {
    4
}

fn default_deadline() -> u64 {
    30
}

/// Redis Streams.
pub const BROKER: Broker = Broker {
    kind: "redis",
    about: "Redis Streams: confirmed publishing to streams of Redis or Valkey, and receiving from them",
    sink: Some(Section::sink::<RedisOptions>(
        "kind = \"redis\"\nurl = \"redis://localhost:6379\"\nstream = \"orders\"\n",
    )),
    subscription: Some(Section::subscription::<RedisSubscriptionOptions>(
        "kind = \"redis\"\nurl = \"redis://localhost:6379\"\nstreams = [\"orders\"]\ngroup = \"billing\"\n",
    )),
};

impl RedisOptions {
    /// The defaults for a stream of the server at `url`.
    pub fn new(url: impl Into<String>, stream: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            stream: stream.into(),
            replicas: 0,
            synced: false,
            batch_messages_max: default_batch(),
            batches_in_flight_max: default_batches(),
            publish_deadline_seconds: default_deadline(),
        }
    }

    fn opened(&self) -> Result<(Address, Template), String> {
        if self.batch_messages_max == 0 || self.batches_in_flight_max == 0 || self.publish_deadline_seconds == 0 {
            let problem = "batch_messages_max, batches_in_flight_max and publish_deadline_seconds must be at least 1";
            return Err(problem.to_owned());
        }
        let address = Address::parse(&self.url)?;
        address.server.files.read()?;
        let stream = Template::parse(&self.stream).map_err(|problem| format!("stream: {problem}"))?;
        stream.fixed().map_or(Ok(()), entry::check_stream).map_err(|problem| format!("stream: {problem}"))?;
        Ok((address, stream))
    }
}

#[async_trait]
impl SinkOptions for RedisOptions {
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        let sink = RedisSink::new(self.clone())?;
        warn_if_in_clear(&self.url);
        Ok(Arc::new(sink))
    }

    fn shown(&self) -> String {
        format!("redis {}, stream {:?}", redact_url(&self.url), self.stream)
    }

    async fn check(&self) -> Result<String, CheckFailed> {
        check::of_sink(self).await
    }

    async fn hazards(&self) -> Result<Vec<Hazard>, CheckFailed> {
        check::hazards(self).await
    }
}

#[async_trait]
impl SubscriptionOptions for RedisSubscriptionOptions {
    fn open(&self, consumer: &str) -> Result<Arc<dyn Subscription>, OpenSubscriptionError> {
        let subscription = RedisSubscription::new(self.clone().of_consumer(consumer))?;
        warn_if_in_clear(&self.url);
        Ok(Arc::new(subscription))
    }

    fn shown(&self) -> String {
        format!("group {:?} of streams {} of redis {}", self.group, self.streams.join(", "), redact_url(&self.url))
    }

    fn takes_from(&self) -> String {
        // Two groups of one name are one group where they share a stream; nobody needs two inboxes of one name.
        format!("group {:?} of redis {}", self.group, redact_url(&self.url))
    }

    async fn check(&self, _: &[String]) -> Result<String, CheckFailed> {
        check::of_subscription(self).await
    }
}

/// Says once for each link that passwords and messages travel in clear to another machine.
fn warn_if_in_clear(url: &str) {
    if Address::parse(url).is_ok_and(|address| !address.server.tls && !address.server.is_here()) {
        let shown = redact_url(url);
        tracing::warn!("the connection to Redis at {shown} is not encrypted; use rediss://");
    }
}
