//! Apache Kafka: publishing with an idempotent producer that all replicas in sync must confirm, and receiving as a member of a consumer group.
//!
//! - A message counts as stored when the delivery report of this very message says so (`acks=all`). Everything else is *unknown*, unless the
//!   broker said what is wrong with it.
//! - The key of a message is the key of its record, so that all messages of a key are in one partition, in their order. The client sends again
//!   by itself within the deadline, and the brokers recognise what they have (`enable.idempotence`): neither changes the order nor repeats.
//! - What was unknown is published again by the relay, and may then be there twice: Kafka does not look at message ids. In transactions
//!   ([`KafkaTransactionsSink`]) it is there once for readers of committed messages.
//! - A topic that does not exist is not created by publishing to it, whatever the broker's settings.
//! - Offsets are committed only behind what is settled. A partition that goes to another member takes its unsettled deliveries along.

mod address;
mod anchors;
mod check;
mod client;
mod context;
mod group;
mod ledger;
mod offsets;
mod progress;
mod record;
mod sink;
mod subscription;
mod topics;
mod transactions;

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Sink, Subscription};
use serde::Deserialize;

use crate::cloud_events::{CloudEvents, Events};
use crate::template::Template;
use crate::{
    Broker, CheckFailed, Hazard, OpenSinkError, OpenSubscriptionError, Section, SinkOptions, SubscriptionOptions,
};

use address::Address;

pub use sink::KafkaSink;
pub use subscription::{KafkaSubscription, KafkaSubscriptionOptions};
pub use transactions::KafkaTransactionsSink;

/// `[routes.sink]` with `kind = "kafka"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KafkaOptions {
    /// `kafka://` or, for TLS, `kafkas://` URL with brokers to begin with. Certificates are verified against the system's roots or what
    /// `cacertfile` in the URL names; `certfile` and `keyfile` are a client certificate; `mechanism` is that of SASL.
    pub url: String,
    /// The topic of a message, with its fields in braces; `{topic}` by default, its topic in the outbox. It must exist.
    #[serde(default = "default_topic")]
    pub topic: String,
    /// How batches are compressed: `none` (the default), `lz4` or `snappy`.
    #[serde(default)]
    pub compression: Compression,
    /// `binary` or `structured`: messages are events of CloudEvents 1.0; not by default.
    #[serde(default)]
    pub cloudevents: Option<CloudEvents>,
    /// Where the events come from, a URI reference such as `https://shop.example/orders`; required by `cloudevents`.
    #[serde(default)]
    pub source: Option<String>,
    /// Most messages of a batch; 1000 by default.
    #[serde(default = "default_batch")]
    pub batch_messages_max: usize,
    /// Most batches whose confirmations are awaited; 4 by default.
    #[serde(default = "default_batches")]
    pub batches_in_flight_max: usize,
    /// Seconds after which an unconfirmed message counts as unknown; 30 by default.
    #[serde(default = "default_deadline")]
    pub publish_deadline_seconds: u64,
    /// Publish in transactions, so that readers of committed messages (`isolation.level=read_committed`) get each message once, also when a
    /// relay dies: what the transactional ids of this route begin with, one for each lane. No other route may use it. Needs `ledger`.
    #[serde(default)]
    pub transactional_id: Option<String>,
    /// The topic in which each transaction lists its messages. It must exist.
    #[serde(default)]
    pub ledger: Option<String>,
}

/// How batches are compressed on their way to the brokers, and stored there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// Not at all.
    #[default]
    None,
    /// By LZ4.
    Lz4,
    /// By Snappy.
    Snappy,
}

impl std::fmt::Debug for KafkaOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaOptions")
            .field("url", &address::shown(&self.url))
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

/// Together a million messages, for which the client has room.
const BATCH_MESSAGES_MAX: u64 = 10_000;
const BATCHES_MAX: u64 = 100;
/// A day; the client accepts up to 24 days.
const DEADLINE_MAX_SECONDS: u64 = 86_400;
/// Brokers accept transactions of up to 15 minutes (`transaction.max.timeout.ms`).
const TRANSACTION_MAX_SECONDS: u64 = 600;
/// With the number of a lane behind it, it is a name in the ledger.
const TRANSACTIONAL_ID_BYTES_MAX: usize = 200;

fn default_topic() -> String {
    "{topic}".to_owned()
}

fn default_batch() -> usize {
    1000
}

fn default_batches() -> usize {
    4
}

fn default_deadline() -> u64 {
    30
}

/// Apache Kafka.
pub const BROKER: Broker = Broker {
    kind: "kafka",
    about: "Apache Kafka: an idempotent producer, confirmed by all replicas in sync; receiving in a consumer group",
    sink: Some(Section::sink::<KafkaOptions>(
        "kind = \"kafka\"\nurl = \"kafka://localhost:9092\"\ntopic = \"shop.{topic}\"\n",
    )),
    subscription: Some(Section::subscription::<KafkaSubscriptionOptions>(
        "kind = \"kafka\"\nurl = \"kafka://localhost:9092\"\ntopics = [\"shop.orders\"]\ngroup = \"billing\"\n",
    )),
};

#[async_trait]
impl SinkOptions for KafkaOptions {
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        let sink: Arc<dyn Sink> = match self.transactional_id {
            Some(_) => Arc::new(KafkaTransactionsSink::new(self.clone())?),
            None => Arc::new(KafkaSink::new(self.clone())?),
        };
        warn_if_in_clear(&self.url);
        Ok(sink)
    }

    fn shown(&self) -> String {
        format!("kafka {}, topic {:?}", address::shown(&self.url), self.topic)
    }

    async fn check(&self) -> Result<String, CheckFailed> {
        check::of_sink(self).await
    }

    fn alone_as(&self) -> Option<String> {
        let id = self.transactional_id.as_ref()?;
        Some(format!("transactional_id {id:?} of kafka {}", address::shown(&self.url)))
    }

    fn in_flight_max(&self) -> Option<usize> {
        self.transactional_id.is_some().then_some(ledger::IN_FLIGHT_MAX)
    }

    async fn hazards(&self) -> Result<Vec<Hazard>, CheckFailed> {
        check::hazards(self).await
    }
}

#[async_trait]
impl SubscriptionOptions for KafkaSubscriptionOptions {
    fn open(&self, consumer: &str) -> Result<Arc<dyn Subscription>, OpenSubscriptionError> {
        let subscription = KafkaSubscription::new(self.clone().of_consumer(consumer))?;
        warn_if_in_clear(&self.url);
        Ok(Arc::new(subscription))
    }

    fn shown(&self) -> String {
        format!("group {:?} of kafka {}, topics {}", self.group, address::shown(&self.url), self.topics.join(", "))
    }

    fn takes_from(&self) -> String {
        format!("group {:?} of kafka {}", self.group, address::shown(&self.url))
    }

    async fn check(&self, _: &[String]) -> Result<String, CheckFailed> {
        check::of_subscription(self).await
    }
}

fn warn_if_in_clear(url: &str) {
    if let Ok(address) = Address::parse(url)
        && !address.is_encrypted
        && !address.is_here()
    {
        tracing::warn!("the connection to Kafka at {} is not encrypted; use kafkas://", address.brokers);
    }
}

impl KafkaOptions {
    /// The defaults for the brokers at `url`.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            topic: default_topic(),
            compression: Compression::default(),
            cloudevents: None,
            source: None,
            batch_messages_max: default_batch(),
            batches_in_flight_max: default_batches(),
            publish_deadline_seconds: default_deadline(),
            transactional_id: None,
            ledger: None,
        }
    }

    fn opened(&self) -> Result<Opened, String> {
        let limits = [
            ("batch_messages_max", self.batch_messages_max as u64, BATCH_MESSAGES_MAX),
            ("batches_in_flight_max", self.batches_in_flight_max as u64, BATCHES_MAX),
            ("publish_deadline_seconds", self.publish_deadline_seconds, DEADLINE_MAX_SECONDS),
        ];
        if let Some((name, _, most)) = limits.into_iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
            return Err(format!("{name} must be between 1 and {most}"));
        }
        let address = Address::parse(&self.url)?;
        address.files.read()?;
        let topic = Template::parse(&self.topic).map_err(|problem| format!("topic: {problem}"))?;
        match topic.fixed() {
            Some(topic) => record::check_topic(topic)?,
            None => topic.texts().try_for_each(record::check_part)?,
        }
        let events = Events::read(self.cloudevents, self.source.as_deref())?;
        let exactly_once = self.exactly_once(&topic)?;
        Ok(Opened { address, topic, events, exactly_once })
    }

    fn exactly_once(&self, topic: &Template) -> Result<Option<ExactlyOnce>, String> {
        let (transactional_id, ledger) = match (&self.transactional_id, &self.ledger) {
            (None, None) => return Ok(None),
            (Some(id), Some(ledger)) => (id.clone(), ledger.clone()),
            (Some(_), None) => {
                return Err(
                    "transactional_id needs a ledger, the topic in which transactions list their messages".to_owned()
                );
            }
            (None, Some(_)) => return Err("a ledger needs a transactional_id".to_owned()),
        };
        if transactional_id.is_empty() || transactional_id.len() > TRANSACTIONAL_ID_BYTES_MAX {
            return Err(format!("transactional_id must have 1 to {TRANSACTIONAL_ID_BYTES_MAX} bytes"));
        }
        record::check_topic(&ledger).map_err(|problem| format!("ledger: {problem}"))?;
        if topic.fixed() == Some(ledger.as_str()) {
            return Err("the ledger must be a topic of its own".to_owned());
        }
        if self.publish_deadline_seconds > TRANSACTION_MAX_SECONDS {
            return Err(format!(
                "with a transactional_id, publish_deadline_seconds must be between 1 and {TRANSACTION_MAX_SECONDS}"
            ));
        }
        Ok(Some(ExactlyOnce { transactional_id, ledger }))
    }
}

/// What is made of the options.
struct Opened {
    address: Address,
    topic: Template,
    events: Option<Events>,
    exactly_once: Option<ExactlyOnce>,
}

/// How messages are published once.
#[derive(Debug, Clone)]
struct ExactlyOnce {
    transactional_id: String,
    ledger: String,
}
