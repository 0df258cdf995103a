//! AMQP 1.0: publishing with outcomes, and receiving with them. For RabbitMQ 4, Azure Service Bus, ActiveMQ Artemis and others.
//!
//! - A message counts as stored when the broker has *accepted* it. Rejected, released and modified are failures, each with its kind.
//! - Every wait has the sink's own deadline; what has no outcome then is *unknown*, and the connection is given up. A connection never comes
//!   back by itself (docs/decisions/0036), so nothing is sent later than anybody knows of.
//! - The client is our own, because a message whose properties are nested deeply ends a process that reads it with the one of the registry
//!   (docs/decisions/0043).

mod address;
mod check;
mod connection;
mod frame;
mod message;
mod peer;
#[cfg(test)]
mod peers;
mod session;
mod sink;
mod subscription;
mod types;

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Sink, Subscription, redact_url};
use serde::Deserialize;

use crate::cloud_events::{CloudEvents, Events};
use crate::server_address::ServerAddress;
use crate::template::Template;
use crate::{
    Broker, CheckFailed, Hazard, OpenSinkError, OpenSubscriptionError, Section, SinkOptions, SubscriptionOptions,
};

use message::Form;

pub use sink::Amqp10Sink;
pub use subscription::{Amqp10Subscription, Amqp10SubscriptionOptions};

/// `[routes.sink]` with `kind = "amqp10"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Amqp10Options {
    /// `amqp://` or, for TLS, `amqps://` URL. Certificates are verified against the system's roots and what `cacertfile` in the URL names;
    /// `certfile` and `keyfile` are a client certificate.
    pub url: String,
    /// Where messages go, as the broker calls it: `/exchanges/orders/{routing_key}` of RabbitMQ, a queue or topic of others; fields of a message
    /// in braces, for brokers that take an address with each message.
    pub address: String,
    /// The subject of a message, with its fields in braces; `{routing_key}` by default, which is the type where it has none.
    #[serde(default = "default_subject")]
    pub subject: String,
    /// Whether the key is also the group of a message: the session of Azure Service Bus, what ActiveMQ gives to one consumer at a time; false.
    #[serde(default)]
    pub key_as_group: bool,
    /// Whether the key is also what Azure Service Bus chooses a partition by; false.
    #[serde(default)]
    pub key_as_partition: bool,
    /// `binary` or `structured`: messages are events of CloudEvents 1.0; not by default.
    #[serde(default)]
    pub cloudevents: Option<CloudEvents>,
    /// Where the events come from, a URI reference such as `https://shop.example/orders`; required by `cloudevents`.
    #[serde(default)]
    pub source: Option<String>,
    /// Most messages of a batch; 500 by default.
    #[serde(default = "default_batch")]
    pub batch_messages_max: usize,
    /// Most batches whose outcomes are awaited; 4 by default.
    #[serde(default = "default_batches")]
    pub batches_in_flight_max: usize,
    /// Seconds after which a message without an outcome counts as unknown; 30 by default.
    #[serde(default = "default_deadline")]
    pub publish_deadline_seconds: u64,
}

impl std::fmt::Debug for Amqp10Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Amqp10Options")
            .field("url", &redact_url(&self.url))
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

const ADDRESS_BYTES_MAX: usize = 1024;

fn default_subject() -> String {
    "{routing_key}".to_owned()
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

/// AMQP 1.0.
pub const BROKER: Broker = Broker {
    kind: "amqp10",
    about: "AMQP 1.0 (RabbitMQ 4, Azure Service Bus, ActiveMQ Artemis): publishing and receiving with outcomes",
    sink: Some(Section::sink::<Amqp10Options>(
        "kind = \"amqp10\"\nurl = \"amqp://localhost:5672\"\naddress = \"/exchanges/orders/{routing_key}\"\n",
    )),
    subscription: Some(Section::subscription::<Amqp10SubscriptionOptions>(
        "kind = \"amqp10\"\nurl = \"amqp://localhost:5672\"\naddress = \"/queues/billing\"\n",
    )),
};

fn check_address(address: &str) -> Result<(), String> {
    if address.is_empty() || address.len() > ADDRESS_BYTES_MAX || address.chars().any(char::is_control) {
        return Err(format!("address must have 1 to {ADDRESS_BYTES_MAX} bytes, and no control characters"));
    }
    Ok(())
}

impl Amqp10Options {
    /// The defaults for a node of the broker at `url`.
    pub fn new(url: impl Into<String>, address: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            address: address.into(),
            subject: default_subject(),
            key_as_group: false,
            key_as_partition: false,
            cloudevents: None,
            source: None,
            batch_messages_max: default_batch(),
            batches_in_flight_max: default_batches(),
            publish_deadline_seconds: default_deadline(),
        }
    }

    fn opened(&self) -> Result<(ServerAddress, Form), String> {
        if self.batch_messages_max == 0 || self.batches_in_flight_max == 0 || self.publish_deadline_seconds == 0 {
            let problem = "batch_messages_max, batches_in_flight_max and publish_deadline_seconds must be at least 1";
            return Err(problem.to_owned());
        }
        check_address(&self.address)?;
        message::check_routing_key(&self.address).map_err(|problem| format!("address: {problem}"))?;
        let server = address::parse(&self.url)?;
        server.files.read()?;
        let subject = Template::parse(&self.subject).map_err(|problem| format!("subject: {problem}"))?;
        let Self { key_as_group, key_as_partition, .. } = *self;
        let to = Template::parse(&self.address).map_err(|problem| format!("address: {problem}"))?;
        let events = Events::read(self.cloudevents, self.source.as_deref())?;
        Ok((server, Form { to, subject, key_as_group, key_as_partition, events }))
    }
}

#[async_trait]
impl SinkOptions for Amqp10Options {
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        let sink = Amqp10Sink::new(self.clone())?;
        warn_if_in_clear(&self.url);
        Ok(Arc::new(sink))
    }

    fn shown(&self) -> String {
        format!("amqp10 {}, address {:?}", redact_url(&self.url), self.address)
    }

    async fn check(&self) -> Result<String, CheckFailed> {
        check::of_sink(self).await
    }

    async fn hazards(&self) -> Result<Vec<Hazard>, CheckFailed> {
        Ok(vec![check::unseen()])
    }
}

#[async_trait]
impl SubscriptionOptions for Amqp10SubscriptionOptions {
    fn open(&self, _: &str) -> Result<Arc<dyn Subscription>, OpenSubscriptionError> {
        let subscription = Amqp10Subscription::new(self.clone())?;
        warn_if_in_clear(&self.url);
        Ok(Arc::new(subscription))
    }

    fn shown(&self) -> String {
        format!("{:?} of amqp10 {}", self.address, redact_url(&self.url))
    }

    fn takes_from(&self) -> String {
        self.shown()
    }

    async fn check(&self, _: &[String]) -> Result<String, CheckFailed> {
        check::of_subscription(self).await
    }
}

/// Says once for each link that passwords and messages travel in clear to another machine.
fn warn_if_in_clear(url: &str) {
    if address::parse(url).is_ok_and(|server| !server.tls && !server.is_here()) {
        let shown = redact_url(url);
        tracing::warn!("the connection to AMQP 1.0 at {shown} is not encrypted; use amqps://");
    }
}
