//! Brokers, one folder each. A broker's options, construction and docs stand in its folder; everything else goes through
//! [`SinkConfig`] and [`SubscriptionConfig`], the lists.

pub mod in_process;
pub mod lines;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;

mod sink_config;
mod subscription_config;

pub use sink_config::{OpenSinkError, SinkConfig};
pub use subscription_config::{OpenSubscriptionError, SubscriptionConfig};
