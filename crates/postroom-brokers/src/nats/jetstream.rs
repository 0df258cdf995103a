//! What is asked of JetStream, and its answers. <https://docs.nats.io/reference/reference-protocols/nats_api_reference>

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::connection::{Answer, Connection};
use super::protocol::Inbound;

/// An error of JetStream, by the number that its server gives it.
/// <https://github.com/nats-io/nats-server/blob/main/server/errors.json>
#[derive(Debug, Clone, Default, Deserialize, thiserror::Error)]
#[serde(default)]
#[error("{description} ({err_code})")]
pub(super) struct ApiError {
    pub code: u16,
    pub err_code: u32,
    pub description: String,
}

impl ApiError {
    pub const CONSUMER_NOT_FOUND: u32 = 10_014;
    pub const MESSAGE_NOT_FOUND: u32 = 10_037;
    pub const MESSAGE_TOO_LARGE: u32 = 10_054;
    pub const STREAM_NOT_FOUND: u32 = 10_059;
    pub const STREAM_NOT_EXPECTED: u32 = 10_060;
    pub const STORING_FAILED: u32 = 10_077;
    pub const CONSUMER_EXISTS: u32 = 10_148;
    pub const CONSUMER_IN_USE: u32 = 10_013;
    pub const DUPLICATE_IN_PROGRESS: u32 = 10_158;
}

/// Why a question had no useful answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unanswered {
    #[error("{0}")]
    Silent(String),
    /// With the subject.
    #[error(
        "nobody answers on {0}: the server has no JetStream, or none for this account, or its stream has no leader now"
    )]
    NoJetStream(String),
    #[error("{0}")]
    Denied(String),
    #[error("{0}")]
    Refused(#[from] ApiError),
}

/// The server's confirmation that it has a message.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct PubAck {
    pub stream: String,
    #[serde(default)]
    pub seq: u64,
    #[serde(default)]
    pub duplicate: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamInfo {
    pub config: StreamConfig,
    pub state: StreamState,
    pub cluster: Option<Cluster>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamConfig {
    pub name: String,
    pub subjects: Vec<String>,
    pub retention: String,
    pub storage: String,
    pub discard: String,
    pub num_replicas: u32,
    pub max_msgs: i64,
    pub max_bytes: i64,
    /// Nanoseconds; 0: none.
    pub max_age: i64,
    pub max_msg_size: i64,
    /// Nanoseconds for which the server remembers message ids.
    pub duplicate_window: u64,
    pub no_ack: bool,
    pub max_msgs_per_subject: i64,
    pub discard_new_per_subject: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamState {
    pub messages: u64,
    pub last_seq: u64,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Cluster {
    pub leader: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct ConsumerInfo {
    pub name: String,
    pub config: ConsumerConfig,
    pub delivered: SequencePair,
    pub ack_floor: SequencePair,
    /// Requests for messages that somebody waits on.
    pub num_waiting: u64,
    pub num_pending: u64,
    pub num_ack_pending: u64,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct ConsumerConfig {
    pub description: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct SequencePair {
    pub stream_seq: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Names {
    total: usize,
    consumers: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Got {
    message: Option<StoredMessage>,
}

/// A message of a stream, by its place.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredMessage {
    /// In base64.
    hdrs: String,
}

impl StoredMessage {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<String> {
        use base64::Engine;
        let block = base64::engine::general_purpose::STANDARD.decode(&self.hdrs).ok()?;
        let (sid, subject, reply, payload) = (0, String::new(), None, bytes::Bytes::new());
        let headers = Inbound { sid, subject, reply, headers: block.into(), payload }.headers();
        headers.into_iter().find(|(found, _)| found == name).map(|(_, value)| value)
    }
}

/// JetStream of one account or domain, over one connection.
pub(super) struct JetStream<'c> {
    pub connection: &'c Connection,
    pub api: &'c str,
    /// When every answer must be there.
    pub by: Instant,
}

/// What subjects of the API begin with.
pub(super) fn api_prefix(domain: Option<&str>) -> String {
    domain.map_or_else(|| "$JS.API".to_owned(), |domain| format!("$JS.{domain}.API"))
}

/// An answer of the API, or its error.
pub(super) fn read<T: DeserializeOwned>(payload: &[u8]) -> Result<T, Unanswered> {
    #[derive(Deserialize)]
    struct Wrapped {
        error: Option<ApiError>,
    }
    let unreadable = |error: serde_json::Error| Unanswered::Silent(format!("its answer cannot be read: {error}"));
    if let Some(error) = serde_json::from_slice::<Wrapped>(payload).map_err(unreadable)?.error {
        return Err(error.into());
    }
    serde_json::from_slice(payload).map_err(unreadable)
}

impl JetStream<'_> {
    async fn ask<T: DeserializeOwned>(&self, what: &str, body: &Value) -> Result<T, Unanswered> {
        let subject = format!("{}.{what}", self.api);
        let body = if body.is_null() { String::new() } else { body.to_string() };
        match self.connection.ask(&subject, body.as_bytes(), self.by).await {
            Ok(Answer::Message(message)) => read(&message.payload),
            Ok(Answer::NoResponders) => Err(Unanswered::NoJetStream(subject)),
            Ok(Answer::Denied(problem)) => Err(Unanswered::Denied(problem)),
            Err(silent) => Err(Unanswered::Silent(silent)),
        }
    }

    pub async fn stream(&self, stream: &str) -> Result<StreamInfo, Unanswered> {
        self.ask(&format!("STREAM.INFO.{stream}"), &Value::Null).await
    }

    pub async fn create_stream(
        &self,
        stream: &str,
        subjects: &[String],
        replicas: u32,
    ) -> Result<StreamInfo, Unanswered> {
        let config = json!({
            "name": stream, "subjects": subjects, "retention": "limits", "storage": "file", "discard": "new",
            "num_replicas": replicas, "max_consumers": -1, "max_msgs": -1, "max_bytes": -1, "max_age": 0,
        });
        self.ask(&format!("STREAM.CREATE.{stream}"), &config).await
    }

    /// A message by its place; none: it is not there any more.
    pub async fn message(&self, stream: &str, seq: u64) -> Result<Option<StoredMessage>, Unanswered> {
        match self.ask::<Got>(&format!("STREAM.MSG.GET.{stream}"), &json!({ "seq": seq })).await {
            Ok(got) => Ok(got.message),
            Err(Unanswered::Refused(error)) if error.err_code == ApiError::MESSAGE_NOT_FOUND => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Names of all consumers of a stream.
    pub async fn consumers(&self, stream: &str) -> Result<Vec<String>, Unanswered> {
        let mut all = Vec::new();
        loop {
            let page: Names = self.ask(&format!("CONSUMER.NAMES.{stream}"), &json!({ "offset": all.len() })).await?;
            let names = page.consumers.unwrap_or_default();
            if names.is_empty() {
                return Ok(all);
            }
            all.extend(names);
            if all.len() >= page.total {
                return Ok(all);
            }
        }
    }

    /// None: there is no such consumer.
    pub async fn consumer(&self, stream: &str, name: &str) -> Result<Option<ConsumerInfo>, Unanswered> {
        match self.ask(&format!("CONSUMER.INFO.{stream}.{name}"), &Value::Null).await {
            Err(Unanswered::Refused(error)) if error.err_code == ApiError::CONSUMER_NOT_FOUND => Ok(None),
            other => other.map(Some),
        }
    }

    pub async fn create_consumer(&self, stream: &str, name: &str, config: &Value) -> Result<ConsumerInfo, Unanswered> {
        let body = json!({ "stream_name": stream, "config": config, "action": "create" });
        self.ask(&format!("CONSUMER.CREATE.{stream}.{name}"), &body).await
    }

    /// One that is not there is fine too.
    pub async fn delete_consumer(&self, stream: &str, name: &str) -> Result<(), Unanswered> {
        match self.ask::<Value>(&format!("CONSUMER.DELETE.{stream}.{name}"), &Value::Null).await {
            Err(Unanswered::Refused(error)) if error.err_code == ApiError::CONSUMER_NOT_FOUND => Ok(()),
            other => other.map(drop),
        }
    }
}
