//! Every broker passes the suites of sinks and of subscriptions.

#![allow(clippy::unwrap_used)]

#[cfg(feature = "amqp10")]
mod amqp10;
#[cfg(feature = "http")]
mod http;
mod in_process;
#[cfg(feature = "kafka")]
mod kafka;
mod lines;
#[cfg(feature = "mqtt")]
mod mqtt;
#[cfg(feature = "nats")]
mod nats;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "smtp")]
mod smtp;
