//! Receiving: what to receive, and what a receiver sees of a session.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use async_trait::async_trait;
use postroom::{Answer, Arrival, Bound, MessageId, Receipt, Subscription, Unavailable, redact_url};
use serde::Deserialize;

use super::address::Address;
use super::entry;
use super::note::Place;
use super::session::{self, LARGEST_AT_FIRST, Session};
use crate::OpenSubscriptionError;
use crate::deliveries::Deliveries;
use crate::sessions::Sessions;

const GROUP_BYTES_MAX: usize = 200;

/// What to receive, and from where; `[inboxes.from]` with `kind = "redis"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RedisSubscriptionOptions {
    /// `redis://` or, for TLS, `rediss://` URL, as a sink has it.
    pub url: String,
    /// The streams.
    pub streams: Vec<String>,
    /// The consumer group that keeps the place in each of them; no two consumers share one.
    pub group: String,
    /// Who receives; a group that another consumer has received in is refused. Empty: that is not looked at.
    #[serde(skip)]
    pub consumer: String,
    /// Whether entries are removed from the streams when all of their groups are behind them; false.
    #[serde(default)]
    pub removes: bool,
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

impl std::fmt::Debug for RedisSubscriptionOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisSubscriptionOptions")
            .field("url", &redact_url(&self.url))
            .field("streams", &self.streams)
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

impl RedisSubscriptionOptions {
    /// The defaults.
    pub fn new(url: impl Into<String>, streams: &[&str], group: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            streams: streams.iter().map(|stream| (*stream).to_owned()).collect(),
            group: group.into(),
            consumer: String::new(),
            removes: false,
            prefetch: default_prefetch(),
            unsettled_bytes_max: default_unsettled_bytes(),
        }
    }

    /// For this consumer alone.
    pub fn of_consumer(self, consumer: impl Into<String>) -> Self {
        Self { consumer: consumer.into(), ..self }
    }

    pub(super) fn opened(&self) -> Result<Address, String> {
        if self.streams.is_empty() {
            return Err("streams must name at least one stream".to_owned());
        }
        for (index, stream) in self.streams.iter().enumerate() {
            entry::check_stream(stream)?;
            if self.streams[..index].contains(stream) {
                return Err(format!("streams has {stream:?} twice"));
            }
        }
        if self.group.is_empty() || self.group.len() > GROUP_BYTES_MAX || self.group.chars().any(char::is_control) {
            return Err(format!("group must have 1 to {GROUP_BYTES_MAX} bytes, and no control characters"));
        }
        if self.prefetch == 0 {
            return Err("prefetch must be at least 1".to_owned());
        }
        if self.unsettled_bytes_max == 0 {
            return Err("unsettled_bytes_max must be at least 1".to_owned());
        }
        let address = Address::parse(&self.url)?;
        address.server.files.read()?;
        Ok(address)
    }
}

/// Receives from streams of one server.
pub struct RedisSubscription {
    options: RedisSubscriptionOptions,
    address: Address,
    /// What its sessions are called at the server, of which there is one at a time.
    token: String,
    /// Bytes of the largest entry of late.
    largest: Arc<AtomicU64>,
    sessions: Sessions<Deliveries<Place>>,
}

impl RedisSubscription {
    /// Checks the options; connects with the first `receive`.
    pub fn new(options: RedisSubscriptionOptions) -> Result<Self, OpenSubscriptionError> {
        let address = options.opened().map_err(|problem| OpenSubscriptionError { kind: "redis", problem })?;
        let token = MessageId::new().to_string();
        let largest = Arc::new(AtomicU64::new(LARGEST_AT_FIRST));
        Ok(Self { options, address, token, largest, sessions: Sessions::default() })
    }

    fn unavailable(&self, error: impl Into<postroom::BoxError>) -> Unavailable {
        let RedisSubscriptionOptions { streams, group, url, .. } = &self.options;
        let (streams, url) = (streams.join(", "), redact_url(url));
        Unavailable::new(format!("streams {streams} in group {group:?} of Redis at {url}"), error)
    }

    /// Connects and begins a session now; `receive` does it otherwise.
    pub async fn connect(&self) -> Result<(), Unavailable> {
        self.current().await.map(drop)
    }

    async fn current(&self) -> Result<Arc<Session>, Unavailable> {
        let begin = session::begin(&self.address, &self.options, (&self.token, self.largest.clone()));
        self.sessions.current(begin).await.map_err(|problem| self.unavailable(problem))
    }
}

#[async_trait]
impl Subscription for RedisSubscription {
    fn system(&self) -> &'static str {
        "redis"
    }

    fn origin(&self) -> String {
        format!("group {:?} of Redis", self.options.group)
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
