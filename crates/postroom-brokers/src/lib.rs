//! Brokers, one folder each. A broker's options, construction, example and docs are in its folder; everything else goes
//! through [`BROKERS`], the list.

pub mod in_process;
pub mod lines;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;

mod brokers;
mod keys;

pub use brokers::{
    BROKERS, Broker, CheckFailed, OpenSinkError, OpenSubscriptionError, Section, SinkOptions, SubscriptionOptions,
    sink_section, subscription_section,
};
