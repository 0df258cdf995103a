//! Brokers, one folder each. A broker's options, construction, example and docs are in its folder; everything else goes
//! through [`BROKERS`], the list.

#[cfg(feature = "amqp10")]
pub mod amqp10;
#[cfg(feature = "http")]
pub mod http;
pub mod in_process;
#[cfg(feature = "kafka")]
pub mod kafka;
pub mod lines;
#[cfg(feature = "mqtt")]
pub mod mqtt;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "smtp")]
pub mod smtp;

mod brokers;
#[cfg(any(feature = "amqp10", feature = "http", feature = "kafka", feature = "mqtt"))]
mod cloud_events;
#[cfg(any(feature = "kafka", feature = "mqtt", feature = "redis"))]
mod deliveries;
mod keys;
#[cfg(any(feature = "amqp10", feature = "mqtt", feature = "redis", feature = "smtp"))]
mod server_address;
#[cfg(any(feature = "amqp10", feature = "mqtt", feature = "redis", feature = "smtp"))]
mod server_stream;
#[cfg(any(feature = "amqp10", feature = "mqtt", feature = "redis"))]
mod sessions;
#[cfg(any(
    feature = "amqp10",
    feature = "http",
    feature = "kafka",
    feature = "mqtt",
    feature = "nats",
    feature = "redis"
))]
mod template;
#[cfg(any(feature = "kafka", feature = "mqtt", feature = "nats", feature = "redis"))]
mod text_headers;
#[cfg(any(
    feature = "amqp10",
    feature = "http",
    feature = "kafka",
    feature = "mqtt",
    feature = "nats",
    feature = "rabbitmq",
    feature = "redis",
    feature = "smtp"
))]
mod tls;

#[cfg(any(feature = "amqp10", feature = "http", feature = "kafka", feature = "mqtt"))]
pub use cloud_events::CloudEvents;

pub use brokers::{
    BROKERS, Broker, CheckFailed, Hazard, OpenSinkError, OpenSubscriptionError, Section, SinkOptions,
    SubscriptionOptions, sink_section, subscription_section,
};
