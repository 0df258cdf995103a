//! The one list of brokers that a configuration can name.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Sink, Subscription};
use serde::de::DeserializeOwned;
use serde_json::Value;

#[cfg(feature = "amqp10")]
use crate::amqp10;
#[cfg(feature = "http")]
use crate::http;
#[cfg(feature = "kafka")]
use crate::kafka;
use crate::keys::keys_of;
use crate::lines;
#[cfg(feature = "mqtt")]
use crate::mqtt;
#[cfg(feature = "nats")]
use crate::nats;
#[cfg(feature = "rabbitmq")]
use crate::rabbitmq;
#[cfg(feature = "redis")]
use crate::redis;
#[cfg(feature = "smtp")]
use crate::smtp;

/// Every broker that can be configured. A further one: its folder, a line here, and its Cargo feature.
pub const BROKERS: &[&Broker] = &[
    #[cfg(feature = "rabbitmq")]
    &rabbitmq::BROKER,
    #[cfg(feature = "nats")]
    &nats::BROKER,
    #[cfg(feature = "kafka")]
    &kafka::BROKER,
    #[cfg(feature = "redis")]
    &redis::BROKER,
    #[cfg(feature = "amqp10")]
    &amqp10::BROKER,
    #[cfg(feature = "mqtt")]
    &mqtt::BROKER,
    #[cfg(feature = "http")]
    &http::BROKER,
    #[cfg(feature = "smtp")]
    &smtp::BROKER,
    &lines::FILE,
    &lines::STDOUT,
];

/// A broker, as a configuration names it.
#[derive(Debug)]
pub struct Broker {
    /// The value of `kind`.
    pub kind: &'static str,
    /// One line for people.
    pub about: &'static str,
    /// How a route sends to it; none: nothing can be sent there.
    pub sink: Option<Section<dyn SinkOptions>>,
    /// How an inbox receives from it; none: nothing can be received.
    pub subscription: Option<Section<dyn SubscriptionOptions>>,
}

/// A section of the configuration, identified by its `kind`.
pub struct Section<O: ?Sized> {
    /// Its keys, without `kind`.
    keys: fn() -> &'static [&'static str],
    read: fn(Value) -> Result<Arc<O>, serde_json::Error>,
    /// The section as a person would write it, in TOML.
    pub example: &'static str,
}

/// Options of a sink.
#[async_trait]
pub trait SinkOptions: Debug + Send + Sync {
    /// Constructs the sink. Connects to nothing: the relay probes it, and goes on probing.
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError>;

    /// What it is, with secrets redacted.
    fn shown(&self) -> String;

    /// Looks whether messages could be sent with these options, and changes nothing; returns what was found.
    async fn check(&self) -> Result<String, CheckFailed>;

    /// What no two routes may share: the broker would take one for the other; none: there is no such thing.
    fn alone_as(&self) -> Option<String> {
        None
    }

    /// The most that a relay may have claimed and not covered by a saved position, for what the sink promises; none: any number.
    fn in_flight_max(&self) -> Option<usize> {
        None
    }

    /// A name for what the sink creates where it is missing, by which a subscription finds it; none: nothing that could be received from.
    fn makes(&self) -> Option<String> {
        None
    }

    /// Settings of the broker that lose what it has confirmed, or that cannot be seen, each with what to do. Changes nothing.
    async fn hazards(&self) -> Result<Vec<Hazard>, CheckFailed> {
        Ok(Vec::new())
    }

    /// For how long the broker stores no second message with an id that it has stored; none: it does not look at ids.
    async fn recognises_ids_for(&self) -> Result<Option<Duration>, CheckFailed> {
        Ok(None)
    }
}

/// A setting of a broker that may lose what it has confirmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hazard {
    /// Whether it is so; else nobody could see.
    pub is_known: bool,
    /// What is lost, and when.
    pub problem: String,
    /// What to do next.
    pub advice: String,
}

/// Options of a subscription.
#[async_trait]
pub trait SubscriptionOptions: Debug + Send + Sync {
    /// Constructs the subscription of the filler of this consumer's inbox, the only consumer of its queue; it connects with the first `receive`.
    fn open(&self, consumer: &str) -> Result<Arc<dyn Subscription>, OpenSubscriptionError>;

    /// What two inboxes may not share: each would get a part of the messages.
    fn takes_from(&self) -> String;

    /// What it is, with secrets redacted.
    fn shown(&self) -> String;

    /// Looks whether messages could be received with these options, and changes nothing; returns what was found. What is missing and
    /// [made](SinkOptions::makes) by a sink beside it is no failure.
    async fn check(&self, made: &[String]) -> Result<String, CheckFailed>;
}

/// Why messages could not be sent or received, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
pub struct CheckFailed {
    /// What is wrong; contains no secret.
    pub problem: String,
    /// What to do next.
    pub advice: String,
}

/// A sink that cannot be set up as configured.
#[derive(Debug, thiserror::Error)]
#[error("set up the {kind} sink: {problem}")]
pub struct OpenSinkError {
    /// Which broker.
    pub kind: &'static str,
    /// What is wrong and what to do.
    pub problem: String,
}

/// A subscription that cannot be set up as configured.
#[derive(Debug, thiserror::Error)]
#[error("set up the {kind} subscription: {problem}")]
pub struct OpenSubscriptionError {
    /// Which broker.
    pub kind: &'static str,
    /// What is wrong and what to do.
    pub problem: String,
}

impl<O: ?Sized> Section<O> {
    /// The keys that the section may have besides `kind`.
    pub fn keys(&self) -> &'static [&'static str] {
        (self.keys)()
    }

    /// Reads the options; `kind` is not among them. Connects to nothing.
    pub fn read(&self, options: Value) -> Result<Arc<O>, serde_json::Error> {
        (self.read)(options)
    }
}

impl<O: ?Sized> Debug for Section<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Section").field("keys", &self.keys()).finish_non_exhaustive()
    }
}

impl Section<dyn SinkOptions> {
    /// The section whose options are `T`.
    pub const fn sink<T: SinkOptions + DeserializeOwned + 'static>(example: &'static str) -> Self {
        let read =
            |options| serde_json::from_value::<T>(options).map(|options| Arc::new(options) as Arc<dyn SinkOptions>);
        Self { keys: keys_of::<T>, read, example }
    }
}

impl Section<dyn SubscriptionOptions> {
    /// The section whose options are `T`.
    pub const fn subscription<T: SubscriptionOptions + DeserializeOwned + 'static>(example: &'static str) -> Self {
        let read = |options| {
            serde_json::from_value::<T>(options).map(|options| Arc::new(options) as Arc<dyn SubscriptionOptions>)
        };
        Self { keys: keys_of::<T>, read, example }
    }
}

/// The broker of this kind that messages can be sent to.
pub fn sink_section(kind: &str) -> Option<&'static Section<dyn SinkOptions>> {
    BROKERS.iter().find(|broker| broker.kind == kind)?.sink.as_ref()
}

/// The broker of this kind that messages can be received from.
pub fn subscription_section(kind: &str) -> Option<&'static Section<dyn SubscriptionOptions>> {
    BROKERS.iter().find(|broker| broker.kind == kind)?.subscription.as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_stands_once_and_can_do_something() {
        for (index, broker) in BROKERS.iter().enumerate() {
            assert!(BROKERS[..index].iter().all(|other| other.kind != broker.kind), "{}", broker.kind);
            assert!(broker.sink.is_some() || broker.subscription.is_some(), "{}", broker.kind);
            assert!(!broker.about.is_empty());
        }
    }

    #[test]
    fn keys_are_those_of_the_options() {
        assert_eq!(sink_section("file").unwrap().keys(), ["path"]);
        assert!(sink_section("stdout").unwrap().keys().is_empty());
        #[cfg(feature = "rabbitmq")]
        assert!(sink_section("rabbitmq").unwrap().keys().contains(&"batch_messages_max"));
        assert!(subscription_section("file").is_none());
    }
}
