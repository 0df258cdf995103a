//! The whole of it on real servers: writers, the `postroom` process, RabbitMQ, an inbox consumer, faults, and the judge.

#![allow(clippy::unwrap_used, missing_docs)]

mod alarms;
mod alerts;
#[cfg(feature = "amqp10")]
mod amqp10;
mod api;
mod archive;
mod commands;
mod crashes;
mod doctor;
mod example;
mod fillers;
mod fleet;
mod http;
mod intake;
mod jetstream;
#[cfg(feature = "kafka")]
mod kafka;
mod killed;
mod many;
mod metrics;
#[cfg(feature = "mqtt")]
mod mqtt;
#[cfg(feature = "mssql")]
mod mssql;
mod operations;
mod operators;
mod outages;
mod poison;
mod receiving;
mod reconcile;
mod redis;
mod retention;
mod rig;
mod shards;
#[cfg(feature = "smtp")]
mod smtp;
mod stops;
mod straight;
mod unroutable;
