//! What the tests of postroom share. Never a dependency of anything that ships.

#[cfg(feature = "tls")]
pub mod authority;
pub mod chance;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod judge;
#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "mqtt")]
pub mod mqtt;
#[cfg(feature = "mssql")]
pub mod mssql;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "proxy")]
pub mod proxy;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
#[cfg(feature = "redis")]
pub mod redis;
pub mod services;
pub mod surroundings;
