//! MQTT 5: publishing with acks (QoS 1), and receiving in a session that the broker keeps.
//!
//! - A message counts as stored when the broker has acked it (`PUBACK`) with success. That nobody subscribes to its topic is no success: such a
//!   message is gone.
//! - Every wait has the sink's own deadline; what has no ack then is *unknown*, and the connection is given up. A connection never comes back by
//!   itself (docs/decisions/0036), and its session at the broker ends with it, so that nothing is sent later than anybody knows of.
//! - A subscription is a session by its client id. What is not acked comes again in its next connection.

mod address;
mod check;
mod connection;
mod message;
mod packet;
mod session;
mod sink;
mod subscription;

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

pub use sink::MqttSink;
pub use subscription::{MqttSubscription, MqttSubscriptionOptions};

/// `[routes.sink]` with `kind = "mqtt"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MqttOptions {
    /// `mqtt://` or, for TLS, `mqtts://` URL. Certificates are verified against the system's roots and what `cacertfile` in the URL names;
    /// `certfile` and `keyfile` are a client certificate.
    pub url: String,
    /// The topic that a message is published to; fields of a message in braces.
    pub topic: String,
    /// What the client ids begin with, for brokers that give rights by them; `postroom` by default.
    #[serde(default = "default_client_id")]
    pub client_id: String,
    /// Whether the broker keeps the last message of each topic for those who subscribe later; false.
    #[serde(default)]
    pub retain: bool,
    /// What becomes of a message whose topic nobody subscribes to.
    #[serde(default)]
    pub unheard: Unheard,
    /// `binary` or `structured`: messages are events of CloudEvents 1.0; not by default.
    #[serde(default)]
    pub cloudevents: Option<CloudEvents>,
    /// Where the events come from, a URI reference such as `https://shop.example/orders`; required by `cloudevents`.
    #[serde(default)]
    pub source: Option<String>,
    /// Most messages of a batch; 500 by default.
    #[serde(default = "default_batch")]
    pub batch_messages_max: usize,
    /// Most batches whose acks are awaited; 4 by default.
    #[serde(default = "default_batches")]
    pub batches_in_flight_max: usize,
    /// Seconds after which an unacked message counts as unknown; 30 by default.
    #[serde(default = "default_deadline")]
    pub publish_deadline_seconds: u64,
}

/// What becomes of a message whose topic nobody subscribes to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unheard {
    /// It has failed, and is tried again; it becomes a dead letter in the end.
    #[default]
    Fail,
    /// The route passes over it.
    Skip,
}

impl std::fmt::Debug for MqttOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MqttOptions")
            .field("url", &redact_url(&self.url))
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

/// With a number behind it, it is a client id.
const CLIENT_ID_BYTES_MAX: usize = 200;

fn default_client_id() -> String {
    "postroom".to_owned()
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

/// MQTT 5.
pub const BROKER: Broker = Broker {
    kind: "mqtt",
    about: "MQTT 5: acked publishing (QoS 1), and receiving in a session that the broker keeps",
    sink: Some(Section::sink::<MqttOptions>(
        "kind = \"mqtt\"\nurl = \"mqtt://localhost:1883\"\ntopic = \"shop/{topic}\"\n",
    )),
    subscription: Some(Section::subscription::<MqttSubscriptionOptions>(
        "kind = \"mqtt\"\nurl = \"mqtt://localhost:1883\"\ntopics = [\"shop/orders\"]\nclient_id = \"billing\"\n",
    )),
};

impl MqttOptions {
    /// The defaults for a topic of the broker at `url`.
    pub fn new(url: impl Into<String>, topic: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            topic: topic.into(),
            client_id: default_client_id(),
            retain: false,
            unheard: Unheard::default(),
            cloudevents: None,
            source: None,
            batch_messages_max: default_batch(),
            batches_in_flight_max: default_batches(),
            publish_deadline_seconds: default_deadline(),
        }
    }

    fn opened(&self) -> Result<(ServerAddress, Template, Option<Events>), String> {
        if self.batch_messages_max == 0 || self.batches_in_flight_max == 0 || self.publish_deadline_seconds == 0 {
            let problem = "batch_messages_max, batches_in_flight_max and publish_deadline_seconds must be at least 1";
            return Err(problem.to_owned());
        }
        if self.client_id.is_empty() || self.client_id.len() > CLIENT_ID_BYTES_MAX {
            return Err(format!("client_id must have 1 to {CLIENT_ID_BYTES_MAX} bytes"));
        }
        let address = address::parse(&self.url)?;
        address.files.read()?;
        let topic = Template::parse(&self.topic).map_err(|problem| format!("topic: {problem}"))?;
        let parts = topic.fixed().into_iter().chain(topic.texts());
        parts
            .filter(|text| !text.is_empty())
            .try_for_each(message::check_topic)
            .map_err(|problem| format!("topic: {problem}"))?;
        Ok((address, topic, Events::read(self.cloudevents, self.source.as_deref())?))
    }
}

#[async_trait]
impl SinkOptions for MqttOptions {
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        let sink = MqttSink::new(self.clone())?;
        warn_if_in_clear(&self.url);
        Ok(Arc::new(sink))
    }

    fn shown(&self) -> String {
        format!("mqtt {}, topic {:?}", redact_url(&self.url), self.topic)
    }

    async fn check(&self) -> Result<String, CheckFailed> {
        check::of_sink(self).await
    }

    async fn hazards(&self) -> Result<Vec<Hazard>, CheckFailed> {
        Ok(vec![check::unseen()])
    }
}

#[async_trait]
impl SubscriptionOptions for MqttSubscriptionOptions {
    fn open(&self, _: &str) -> Result<Arc<dyn Subscription>, OpenSubscriptionError> {
        let subscription = MqttSubscription::new(self.clone())?;
        warn_if_in_clear(&self.url);
        Ok(Arc::new(subscription))
    }

    fn shown(&self) -> String {
        format!("session {:?} of mqtt {}, topics {}", self.client_id, redact_url(&self.url), self.topics.join(", "))
    }

    fn takes_from(&self) -> String {
        format!("session {:?} of mqtt {}", self.client_id, redact_url(&self.url))
    }

    async fn check(&self, _: &[String]) -> Result<String, CheckFailed> {
        check::of_subscription(self).await
    }
}

/// Says once for each link that passwords and messages travel in clear to another machine.
fn warn_if_in_clear(url: &str) {
    if address::parse(url).is_ok_and(|address| !address.tls && !address.is_here()) {
        let shown = redact_url(url);
        tracing::warn!("the connection to MQTT at {shown} is not encrypted; use mqtts://");
    }
}
