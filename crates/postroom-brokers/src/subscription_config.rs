//! The one list of brokers that a configuration file can receive from.

use std::sync::Arc;

use postroom::Subscription;
use serde::Deserialize;

#[cfg(feature = "rabbitmq")]
use crate::rabbitmq;

/// Where an inbox gets its messages: the `[inboxes.from]` section, told apart by `kind`.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum SubscriptionConfig {
    /// RabbitMQ.
    #[cfg(feature = "rabbitmq")]
    Rabbitmq(rabbitmq::RabbitmqSubscriptionOptions),
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

impl SubscriptionConfig {
    /// Names that `kind` may have.
    pub const KINDS: &'static [&'static str] = &[
        #[cfg(feature = "rabbitmq")]
        "rabbitmq",
    ];

    /// Keys of the section of one kind, for suggestions.
    pub fn keys(kind: &str) -> &'static [&'static str] {
        match kind {
            #[cfg(feature = "rabbitmq")]
            "rabbitmq" => rabbitmq::RabbitmqSubscriptionOptions::KEYS,
            _ => &[],
        }
    }

    /// Constructs the subscription; it connects with the first `receive`.
    pub fn open(&self) -> Result<Arc<dyn Subscription>, OpenSubscriptionError> {
        match self {
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(options) => Ok(Arc::new(rabbitmq::RabbitmqSubscription::new(options.clone())?)),
        }
    }

    /// What it is, with secrets redacted.
    pub fn shown(&self) -> String {
        match self {
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(options) => {
                format!("queue {:?} of rabbitmq {}", options.queue, postroom::redact_url(&options.url))
            }
        }
    }
}
