//! NATS JetStream: publishing with confirmations and message ids, and receiving with acks.
//!
//! - A message counts as stored when the stream that was named confirmed it with a place in it. What the server takes for a duplicate is
//!   looked up first.
//! - Every wait has the sink's own deadline; what has no answer then is *unknown*, the connection is given up, and the message is published
//!   again with the same id, which the stream recognises within its `duplicate_window`.
//! - A connection never comes back by itself, so that nothing is sent later than anybody knows of (docs/decisions/0036).
//! - A subscription is a consumer of its own for each session, which begins behind the last message that the one before had acked: what is
//!   handed out again comes in the order of the stream, and a session that is over settles nothing.

mod address;
mod check;
mod connection;
mod headers;
mod jetstream;
mod protocol;
mod sessions;
mod sink;
mod subject;
mod subscription;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Sink, Subscription};
use serde::Deserialize;

use crate::template::Template;
use crate::{
    Broker, CheckFailed, Hazard, OpenSinkError, OpenSubscriptionError, Section, SinkOptions, SubscriptionOptions,
};

use address::{Address, Credentials};
use connection::{Client, Connection};

pub use sessions::{Begin, NatsSubscriptionOptions};
pub use sink::NatsSink;
pub use subscription::NatsSubscription;

/// `[routes.sink]` with `kind = "nats"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NatsOptions {
    /// `nats://` or `tls://` URL, several with commas between them. Certificates are verified against the system's roots and what
    /// `cacertfile` in the URL names; `certfile` and `keyfile` are a client certificate.
    pub url: String,
    /// A file of credentials, with the token of a user and its key.
    #[serde(default)]
    pub credentials_file: Option<PathBuf>,
    /// The stream that stores the messages; no other is taken.
    pub stream: String,
    /// Create the stream with these subjects where it is missing; none: it must exist.
    #[serde(default)]
    pub subjects: Vec<String>,
    /// Replicas of a stream that is created; 1 by default.
    #[serde(default = "default_replicas")]
    pub replicas: u32,
    /// The subject of a message, with its fields in braces; `{routing_key}` by default, which is the type where it has none.
    #[serde(default = "default_subject")]
    pub subject: String,
    /// JetStream domain; none by default.
    #[serde(default)]
    pub domain: Option<String>,
    /// What the subjects of answers begin with; `_INBOX` by default.
    #[serde(default = "default_inbox_prefix")]
    pub inbox_prefix: String,
    /// `http://` URL of the server's monitoring, for `postroom doctor`; none by default.
    #[serde(default)]
    pub monitoring_url: Option<String>,
    /// Most messages of a batch; 250 by default.
    #[serde(default = "default_batch")]
    pub batch_messages_max: usize,
    /// Most batches whose confirmations are awaited; 4 by default.
    #[serde(default = "default_batches")]
    pub batches_in_flight_max: usize,
    /// Seconds after which an unconfirmed message counts as unknown; 30 by default.
    #[serde(default = "default_deadline")]
    pub publish_deadline_seconds: u64,
}

impl std::fmt::Debug for NatsOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NatsOptions")
            .field("url", &address::shown(&self.url))
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

fn default_replicas() -> u32 {
    1
}

fn default_subject() -> String {
    "{routing_key}".to_owned()
}

fn default_inbox_prefix() -> String {
    "_INBOX".to_owned()
}

fn default_batch() -> usize {
    250
}

fn default_batches() -> usize {
    4
}

fn default_deadline() -> u64 {
    30
}

/// NATS JetStream.
pub const BROKER: Broker = Broker {
    kind: "nats",
    about: "NATS JetStream: confirmed publishing with message ids to a stream, acked receiving from it",
    sink: Some(Section::sink::<NatsOptions>(
        "kind = \"nats\"\nurl = \"nats://localhost:4222\"\nstream = \"ORDERS\"\n\
         subjects = [\"orders.>\"]\nsubject = \"orders.{type}\"\n",
    )),
    subscription: Some(Section::subscription::<NatsSubscriptionOptions>(
        "kind = \"nats\"\nurl = \"nats://localhost:4222\"\nstream = \"ORDERS\"\nconsumer = \"billing\"\n",
    )),
};

#[async_trait]
impl SinkOptions for NatsOptions {
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        let sink = NatsSink::new(self.clone())?;
        warn_if_in_clear(&self.url);
        Ok(Arc::new(sink))
    }

    fn shown(&self) -> String {
        format!("nats {}, stream {:?}", address::shown(&self.url), self.stream)
    }

    async fn check(&self) -> Result<String, CheckFailed> {
        check::of_sink(self).await
    }

    fn makes(&self) -> Option<String> {
        (!self.subjects.is_empty()).then(|| check::name_of(&self.url, self.domain.as_deref(), &self.stream))
    }

    async fn hazards(&self) -> Result<Vec<Hazard>, CheckFailed> {
        check::hazards(self).await
    }

    async fn recognises_ids_for(&self) -> Result<Option<Duration>, CheckFailed> {
        check::recognises_ids_for(self).await.map(Some)
    }
}

#[async_trait]
impl SubscriptionOptions for NatsSubscriptionOptions {
    fn open(&self, _: &str) -> Result<Arc<dyn Subscription>, OpenSubscriptionError> {
        let subscription = NatsSubscription::new(self.clone())?;
        warn_if_in_clear(&self.url);
        Ok(Arc::new(subscription))
    }

    fn shown(&self) -> String {
        format!("consumer {:?} of stream {:?} of nats {}", self.consumer, self.stream, address::shown(&self.url))
    }

    fn takes_from(&self) -> String {
        self.shown()
    }

    async fn check(&self, made: &[String]) -> Result<String, CheckFailed> {
        check::of_subscription(self, made).await
    }
}

/// What is made of the options that both sides have.
struct Opened {
    addresses: Vec<Address>,
    credentials_file: Option<PathBuf>,
    inbox_prefix: String,
    api: String,
    subject: Template,
    /// The URL without passwords.
    shown: String,
}

impl Opened {
    fn of(
        url: &str,
        credentials_file: Option<&PathBuf>,
        (domain, inbox_prefix): (Option<&str>, &str),
        subject: &str,
    ) -> Result<Self, String> {
        let addresses = Address::all(url)?;
        for address in &addresses {
            address.files.read()?;
        }
        credentials_file.map(|file| Credentials::read(file)).transpose()?;
        if let Some(domain) = domain {
            subject::check_name("domain", domain)?;
        }
        for part in inbox_prefix.split('.') {
            subject::check_name("inbox_prefix", part)?;
        }
        Ok(Self {
            addresses,
            credentials_file: credentials_file.cloned(),
            inbox_prefix: inbox_prefix.to_owned(),
            api: jetstream::api_prefix(domain),
            subject: Template::parse(subject).map_err(|problem| format!("subject: {problem}"))?,
            shown: address::shown(url),
        })
    }

    async fn connect(&self, name: &'static str) -> Result<Connection, String> {
        let credentials = self.credentials_file.as_deref().map(Credentials::read).transpose()?;
        let client = Client { name, credentials: credentials.as_ref(), inbox_prefix: &self.inbox_prefix };
        Connection::open(&self.addresses, &client).await
    }
}

impl NatsOptions {
    /// The defaults for a stream of the server at `url`.
    pub fn new(url: impl Into<String>, stream: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            credentials_file: None,
            stream: stream.into(),
            subjects: Vec::new(),
            replicas: default_replicas(),
            subject: default_subject(),
            domain: None,
            inbox_prefix: default_inbox_prefix(),
            monitoring_url: None,
            batch_messages_max: default_batch(),
            batches_in_flight_max: default_batches(),
            publish_deadline_seconds: default_deadline(),
        }
    }

    fn opened(&self) -> Result<Opened, String> {
        subject::check_name("stream", &self.stream)?;
        if self.batch_messages_max == 0 || self.batches_in_flight_max == 0 || self.publish_deadline_seconds == 0 {
            let problem = "batch_messages_max, batches_in_flight_max and publish_deadline_seconds must be at least 1";
            return Err(problem.to_owned());
        }
        if !(1..=5).contains(&self.replicas) {
            return Err("replicas must be between 1 and 5".to_owned());
        }
        if let Some(url) = &self.monitoring_url {
            check::monitoring_address(url)?;
        }
        let domain_and_inbox = (self.domain.as_deref(), self.inbox_prefix.as_str());
        Opened::of(&self.url, self.credentials_file.as_ref(), domain_and_inbox, &self.subject)
    }
}

/// Says once for each link that passwords and messages may travel in clear to another machine.
fn warn_if_in_clear(url: &str) {
    let in_clear = |address: &Address| !address.tls_required && !address.is_here();
    if Address::all(url).is_ok_and(|all| all.iter().any(in_clear)) {
        let shown = address::shown(url);
        tracing::warn!("the connection to NATS at {shown} is not encrypted unless the server insists; use tls://");
    }
}
