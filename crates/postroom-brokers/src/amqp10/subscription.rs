//! Receiving: what to receive, and what a receiver sees of a session.

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Answer, Arrival, Bound, Receipt, Subscription, Unavailable, redact_url};
use serde::Deserialize;

use super::session::{self, Held, Session};
use super::{address, check_address};
use crate::OpenSubscriptionError;
use crate::server_address::ServerAddress;
use crate::sessions::Sessions;

/// What to receive, and from where; `[inboxes.from]` with `kind = "amqp10"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Amqp10SubscriptionOptions {
    /// `amqp://` or, for TLS, `amqps://` URL, as a sink has it.
    pub url: String,
    /// Where messages come from, as the broker calls it: `/queues/billing` of RabbitMQ, a queue or subscription of others.
    pub address: String,
    /// Most deliveries handed out and not settled; 1000.
    #[serde(default = "default_prefetch")]
    pub prefetch: u16,
    /// Most bytes of deliveries handed out and not settled, in which one message may be larger; 64 MiB.
    #[serde(default = "default_unsettled_bytes")]
    pub unsettled_bytes_max: u64,
}

fn default_prefetch() -> u16 {
    1000
}

fn default_unsettled_bytes() -> u64 {
    64 << 20
}

impl std::fmt::Debug for Amqp10SubscriptionOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Amqp10SubscriptionOptions")
            .field("url", &redact_url(&self.url))
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Amqp10SubscriptionOptions {
    /// The defaults.
    pub fn new(url: impl Into<String>, address: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            address: address.into(),
            prefetch: default_prefetch(),
            unsettled_bytes_max: default_unsettled_bytes(),
        }
    }

    pub(super) fn opened(&self) -> Result<ServerAddress, String> {
        check_address(&self.address)?;
        if self.prefetch == 0 || self.unsettled_bytes_max == 0 {
            return Err("prefetch and unsettled_bytes_max must be at least 1".to_owned());
        }
        let server = address::parse(&self.url)?;
        server.files.read()?;
        Ok(server)
    }
}

/// Receives from one node of one broker.
pub struct Amqp10Subscription {
    options: Amqp10SubscriptionOptions,
    server: ServerAddress,
    sessions: Sessions<Held>,
}

impl Amqp10Subscription {
    /// Checks the options; connects with the first `receive`.
    pub fn new(options: Amqp10SubscriptionOptions) -> Result<Self, OpenSubscriptionError> {
        let server = options.opened().map_err(|problem| OpenSubscriptionError { kind: "amqp10", problem })?;
        Ok(Self { options, server, sessions: Sessions::default() })
    }

    fn unavailable(&self, error: impl Into<postroom::BoxError>) -> Unavailable {
        let (address, url) = (&self.options.address, redact_url(&self.options.url));
        Unavailable::new(format!("{address:?} of AMQP 1.0 at {url}"), error)
    }

    /// Connects now; `receive` does it otherwise.
    pub async fn connect(&self) -> Result<(), Unavailable> {
        self.current().await.map(drop)
    }

    async fn current(&self) -> Result<Arc<Session>, Unavailable> {
        let begin = session::begin(&self.server, &self.options);
        self.sessions.current(begin).await.map_err(|problem| self.unavailable(problem))
    }
}

#[async_trait]
impl Subscription for Amqp10Subscription {
    fn system(&self) -> &'static str {
        "amqp10"
    }

    fn origin(&self) -> String {
        format!("{:?} of an AMQP 1.0 broker", self.options.address)
    }

    fn is_connected(&self) -> bool {
        self.sessions.is_connected()
    }

    async fn receive(&self, max: Bound) -> Result<Arrival, Unavailable> {
        let session = self.current().await?;
        self.sessions.receive(&session, max).await.map_err(|why| self.unavailable(why))
    }

    async fn settle(&self, answers: &[(Receipt, Answer)]) -> Result<(), Unavailable> {
        self.sessions.settle(answers, |why| self.unavailable(why))
    }

    async fn close(&self) {
        self.sessions.close().await;
    }
}
