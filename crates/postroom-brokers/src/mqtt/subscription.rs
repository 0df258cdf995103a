//! Receiving: what to receive, and what a receiver sees of a session.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use postroom::{Answer, Arrival, Bound, Receipt, Subscription, Unavailable, redact_url};
use serde::Deserialize;

use super::session::{self, Held, Session};
use super::{address, message};
use crate::OpenSubscriptionError;
use crate::server_address::ServerAddress;
use crate::sessions::Sessions;

const CLIENT_ID_BYTES_MAX: usize = 200;
const DAY_SECONDS: u64 = 86_400;

/// What to receive, and from where; `[inboxes.from]` with `kind = "mqtt"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MqttSubscriptionOptions {
    /// `mqtt://` or, for TLS, `mqtts://` URL, as a sink has it.
    pub url: String,
    /// Topic filters: `+` stands for one level, `#` at the end for all that follow.
    pub topics: Vec<String>,
    /// By what the broker knows the session in which it keeps messages; no two receivers share one.
    pub client_id: String,
    /// How long the broker keeps that session, and messages in it, while nobody receives; 7 days.
    #[serde(default = "default_expiry")]
    pub session_expiry_days: u64,
    /// Most deliveries handed out and not settled; 1000.
    #[serde(default = "default_prefetch")]
    pub prefetch: u16,
    /// Most bytes of deliveries handed out and not settled, in which one message may be larger; 64 MiB.
    #[serde(default = "default_unsettled_bytes")]
    pub unsettled_bytes_max: u64,
}

fn default_expiry() -> u64 {
    7
}

fn default_prefetch() -> u16 {
    1000
}

fn default_unsettled_bytes() -> u64 {
    64 << 20
}

impl std::fmt::Debug for MqttSubscriptionOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MqttSubscriptionOptions")
            .field("url", &redact_url(&self.url))
            .field("topics", &self.topics)
            .field("client_id", &self.client_id)
            .finish_non_exhaustive()
    }
}

impl MqttSubscriptionOptions {
    /// The defaults.
    pub fn new(url: impl Into<String>, topics: &[&str], client_id: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
            client_id: client_id.into(),
            session_expiry_days: default_expiry(),
            prefetch: default_prefetch(),
            unsettled_bytes_max: default_unsettled_bytes(),
        }
    }

    pub(super) fn session_expiry_seconds(&self) -> u32 {
        u32::try_from(self.session_expiry_days.saturating_mul(DAY_SECONDS)).unwrap_or(u32::MAX)
    }

    pub(super) fn opened(&self) -> Result<ServerAddress, String> {
        if self.topics.is_empty() {
            return Err("topics must name at least one topic filter".to_owned());
        }
        for (index, topic) in self.topics.iter().enumerate() {
            message::check_filter(topic)?;
            if self.topics[..index].contains(topic) {
                return Err(format!("topics has {topic:?} twice"));
            }
        }
        let id = &self.client_id;
        if id.is_empty() || id.len() > CLIENT_ID_BYTES_MAX || id.chars().any(char::is_control) {
            return Err(format!("client_id must have 1 to {CLIENT_ID_BYTES_MAX} bytes, and no control characters"));
        }
        if self.prefetch == 0 || self.unsettled_bytes_max == 0 || self.session_expiry_days == 0 {
            return Err("prefetch, unsettled_bytes_max and session_expiry_days must be at least 1".to_owned());
        }
        let address = address::parse(&self.url)?;
        address.files.read()?;
        Ok(address)
    }
}

/// Receives from topics of one broker.
pub struct MqttSubscription {
    options: MqttSubscriptionOptions,
    address: ServerAddress,
    sessions: Sessions<Held>,
    /// There was a session.
    knew: AtomicBool,
}

impl MqttSubscription {
    /// Checks the options; connects with the first `receive`.
    pub fn new(options: MqttSubscriptionOptions) -> Result<Self, OpenSubscriptionError> {
        let address = options.opened().map_err(|problem| OpenSubscriptionError { kind: "mqtt", problem })?;
        Ok(Self { options, address, sessions: Sessions::default(), knew: AtomicBool::new(false) })
    }

    fn unavailable(&self, error: impl Into<postroom::BoxError>) -> Unavailable {
        let MqttSubscriptionOptions { topics, client_id, url, .. } = &self.options;
        let (topics, url) = (topics.join(", "), redact_url(url));
        Unavailable::new(format!("topics {topics} as {client_id:?} of MQTT at {url}"), error)
    }

    /// Connects and subscribes now; `receive` does it otherwise.
    pub async fn connect(&self) -> Result<(), Unavailable> {
        self.current().await.map(drop)
    }

    async fn current(&self) -> Result<Arc<Session>, Unavailable> {
        let begin = async {
            let session = session::begin(&self.address, &self.options, self.knew.load(Ordering::Relaxed)).await?;
            self.knew.store(true, Ordering::Relaxed);
            Ok::<_, String>(session)
        };
        self.sessions.current(begin).await.map_err(|problem| self.unavailable(problem))
    }
}

#[async_trait]
impl Subscription for MqttSubscription {
    fn system(&self) -> &'static str {
        "mqtt"
    }

    fn origin(&self) -> String {
        format!("session {:?} of an MQTT broker", self.options.client_id)
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
