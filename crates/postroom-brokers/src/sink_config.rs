//! The one list of brokers that a configuration file can name.

use std::sync::Arc;

use postroom::Sink;
use serde::Deserialize;

use crate::lines;
#[cfg(feature = "rabbitmq")]
use crate::rabbitmq;

/// Where a route sends its messages: the `[routes.sink]` section, told apart by `kind`.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum SinkConfig {
    /// RabbitMQ.
    #[cfg(feature = "rabbitmq")]
    Rabbitmq(rabbitmq::RabbitmqOptions),
    /// A file of JSON lines.
    File(lines::FileOptions),
    /// JSON lines on standard output.
    Stdout(lines::StdoutOptions),
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

impl SinkConfig {
    /// Names that `kind` may have.
    pub const KINDS: &'static [&'static str] = &[
        #[cfg(feature = "rabbitmq")]
        "rabbitmq",
        "file",
        "stdout",
    ];

    /// Keys of the section of one kind, for suggestions.
    pub fn keys(kind: &str) -> &'static [&'static str] {
        match kind {
            #[cfg(feature = "rabbitmq")]
            "rabbitmq" => rabbitmq::RabbitmqOptions::KEYS,
            "file" => lines::FileOptions::KEYS,
            _ => &[],
        }
    }

    /// Constructs the sink. Connects to nothing: the relay probes it, and goes on probing.
    pub fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        match self {
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(options) => Ok(Arc::new(rabbitmq::RabbitmqSink::new(options.clone())?)),
            Self::File(options) => Ok(Arc::new(lines::LinesSink::file(options))),
            Self::Stdout(_) => Ok(Arc::new(lines::LinesSink::stdout())),
        }
    }

    /// What it is, with secrets redacted.
    pub fn shown(&self) -> String {
        match self {
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(options) => format!("rabbitmq {}", postroom::redact_url(&options.url)),
            Self::File(options) => format!("file {}", options.path.display()),
            Self::Stdout(_) => "stdout".to_owned(),
        }
    }
}
