//! What an application writes and a broker receives.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use uuid::Uuid;

use crate::limits::{self, LimitExceeded};

/// Identity of a message, made by the writer and kept through every delivery, retry and replay: the inbox compares it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct MessageId(Uuid);

impl MessageId {
    /// A new UUIDv7 (RFC 9562): its leading bits are the time in milliseconds, so an index on ids grows at one end.
    #[allow(clippy::new_without_default, reason = "a new identity is not a default value")]
    #[allow(clippy::disallowed_methods, reason = "this is the one door for identity")]
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// The id as a UUID.
    pub fn as_uuid(&self) -> &Uuid {
        &self.0
    }
}

impl From<Uuid> for MessageId {
    fn from(id: Uuid) -> Self {
        Self(id)
    }
}

impl From<MessageId> for Uuid {
    fn from(id: MessageId) -> Self {
        id.0
    }
}

impl FromStr for MessageId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Uuid::from_str(text).map(Self)
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Headers of a message: names and text values, sorted by name. NUL is kept; encode bytes that are not text as base64.
pub type Headers = BTreeMap<String, String>;

/// Header of a received message whose properties could not all be read; its value is the reason in words. Such a message is kept
/// as a dead letter. Only a subscription sets this header: a sender's own header of this name arrives under another name.
pub const UNREADABLE_HEADER: &str = "postroom-unreadable";

/// Header that carries header text that is not a JSON object, which a plain insert may have written.
const UNDECODED_HEADERS: &str = "postroom-undecoded-headers";

/// Headers from the JSON in a store. A value that is not text becomes its JSON, exactly as it was written; if a name occurs
/// twice, the last value counts. JSON that cannot be decoded is sent unchanged in the header `postroom-undecoded-headers`: a
/// message must not be lost because of its headers.
pub fn headers_from_json(json: Option<&str>) -> Headers {
    let Some(json) = json else { return Headers::new() };
    decoded(json).unwrap_or_else(|_| Headers::from([(UNDECODED_HEADERS.to_owned(), json.to_owned())]))
}

fn decoded(json: &str) -> Result<Headers, serde_json::Error> {
    // Raw, because a number that went through a float or an integer loses digits.
    let fields: BTreeMap<String, &serde_json::value::RawValue> = serde_json::from_str(json)?;
    let text = |value: &str| match value.starts_with('"') {
        true => serde_json::from_str(value),
        false => Ok(value.to_owned()),
    };
    fields.into_iter().map(|(name, value)| Ok((name, text(value.get())?))).collect()
}

/// One message, as the application writes it.
///
/// The payload is opaque: the bytes that go in are the bytes that come out at the broker.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    /// Identity; see [`MessageId`].
    pub id: MessageId,
    /// What the message is about (`orders`); routes select messages by it.
    pub topic: String,
    /// Stable name of the event (`order.placed`), independent of any class name.
    pub kind: String,
    /// Messages with the same key are in order. Without a key, the aggregate id is the key; without either, there is no order.
    pub key: Option<String>,
    /// Address at the broker; if absent, the type is used.
    pub routing_key: Option<String>,
    /// Opaque bytes.
    pub payload: Bytes,
    /// Media type of the payload.
    pub content_type: String,
    /// Text headers, carried to the broker as they are.
    pub headers: Headers,
    /// Tenant that the message belongs to.
    pub tenant_id: Option<String>,
    /// Type of the aggregate that raised the event.
    pub aggregate_type: Option<String>,
    /// Id of the aggregate that raised the event.
    pub aggregate_id: Option<String>,
    /// Version of the aggregate after the event.
    pub aggregate_version: Option<i64>,
    /// When it happened; if absent, the time of writing by the database's clock. Informational: no decision depends on it.
    pub occurred_at: Option<SystemTime>,
    /// Publish no earlier than this long after the write, by the database's clock. Zero means at once.
    pub delay: Duration,
}

impl Message {
    /// A message with a new id. `topic` is what it is about, `kind` the stable name of the event.
    pub fn new(topic: impl Into<String>, kind: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self {
            id: MessageId::new(),
            topic: topic.into(),
            kind: kind.into(),
            key: None,
            routing_key: None,
            payload: payload.into(),
            content_type: "application/octet-stream".to_owned(),
            headers: Headers::new(),
            tenant_id: None,
            aggregate_type: None,
            aggregate_id: None,
            aggregate_version: None,
            occurred_at: None,
            delay: Duration::ZERO,
        }
    }

    /// A message whose payload is `value` as JSON.
    pub fn json(
        topic: impl Into<String>,
        kind: impl Into<String>,
        value: &impl serde::Serialize,
    ) -> Result<Self, serde_json::Error> {
        Ok(Self::new(topic, kind, serde_json::to_vec(value)?).content_type("application/json"))
    }

    /// Replaces the id, for writers that derive it from their own data.
    pub fn id(mut self, id: MessageId) -> Self {
        self.id = id;
        self
    }

    /// Sets the key within which order holds.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Sets the address at the broker.
    pub fn routing_key(mut self, routing_key: impl Into<String>) -> Self {
        self.routing_key = Some(routing_key.into());
        self
    }

    /// Sets the media type of the payload.
    pub fn content_type(mut self, content_type: impl Into<String>) -> Self {
        self.content_type = content_type.into();
        self
    }

    /// Adds or replaces one header.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// Carries a W3C trace context (`00-<trace id>-<span id>-<flags>`) in the `traceparent` header.
    pub fn traceparent(self, traceparent: impl Into<String>) -> Self {
        self.header("traceparent", traceparent)
    }

    /// Sets the tenant.
    pub fn tenant(mut self, tenant_id: impl Into<String>) -> Self {
        self.tenant_id = Some(tenant_id.into());
        self
    }

    /// Sets the aggregate that raised the event; its id is the key unless a key is set.
    pub fn aggregate(mut self, kind: impl Into<String>, id: impl Into<String>, version: i64) -> Self {
        self.aggregate_type = Some(kind.into());
        self.aggregate_id = Some(id.into());
        self.aggregate_version = Some(version);
        self
    }

    /// Publishes no earlier than `delay` after the write. A delayed message takes its place in its key when it is due.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Its size in memory, in bytes: payload, headers, and 512 for the rest. The reads of the stores count in the same way.
    pub fn weight(&self) -> usize {
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        self.payload.len() + headers + 512
    }

    /// The key within which this message is ordered: its key, else its aggregate's id, else none.
    pub fn ordering_key(&self) -> Option<&str> {
        self.key.as_deref().or(self.aggregate_id.as_deref())
    }

    /// The address at the broker: the routing key, else the type.
    pub fn address(&self) -> &str {
        self.routing_key.as_deref().unwrap_or(&self.kind)
    }

    /// Rejects what no store accepts; called by every `enqueue`, so that an invalid message fails before any row is written.
    pub fn check(&self) -> Result<(), LimitExceeded> {
        limits::check(self)
    }
}

/// Never shows the payload or the header values: they may contain personal data, and debug output ends up in logs.
impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("id", &self.id)
            .field("topic", &self.topic)
            .field("type", &self.kind)
            .field("key", &self.ordering_key())
            .field("payload_bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_aggregate_id_is_the_key_unless_a_key_is_set() {
        let message = Message::new("orders", "order.placed", "").aggregate("order", "o-1", 1);
        assert_eq!(message.ordering_key(), Some("o-1"));
        assert_eq!(message.key("k").ordering_key(), Some("k"));
    }

    #[test]
    fn header_values_that_are_not_text_keep_their_json_as_it_was_written() {
        let json = r#" { "id" : 12345678901234567890123, "small": 1.10, "exponent": 1E+2, "huge": 1e999, "text": "a\u0000\"b",
            "list": [1.0,  2], "object": {"b":1,"a":{"n":9007199254740993}}, "null": null, "truth": true, "": "" } "#;
        let headers = headers_from_json(Some(json));
        let expected = [
            ("", ""),
            ("exponent", "1E+2"),
            ("huge", "1e999"),
            ("id", "12345678901234567890123"),
            ("list", "[1.0,  2]"),
            ("null", "null"),
            ("object", r#"{"b":1,"a":{"n":9007199254740993}}"#),
            ("small", "1.10"),
            ("text", "a\0\"b"),
            ("truth", "true"),
        ];
        let expected: Headers = expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        assert_eq!(headers, expected);
        let deep = format!("{{\"deep\":{}1{},\"n\":1}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(headers_from_json(Some(&deep))["n"], "1");
    }

    #[test]
    fn of_two_headers_with_one_name_the_last_counts_and_what_is_no_object_of_headers_stays_whole() {
        assert_eq!(headers_from_json(Some(r#"{"a": 1, "a": "2"}"#))["a"], "2");
        for whole in [r#"["a"]"#, "null", "17", "", "{", r#"{"a": "\ud800"}"#, r#"{"a": 1} 2"#] {
            assert_eq!(headers_from_json(Some(whole))[UNDECODED_HEADERS], whole);
        }
        assert_eq!(headers_from_json(None), Headers::new());
        assert_eq!(headers_from_json(Some("{}")), Headers::new());
    }

    #[test]
    fn debug_output_shows_neither_payload_nor_header_values() {
        let message = Message::new("orders", "order.placed", "4111-1111").header("authorization", "secret");
        let shown = format!("{message:?}");
        assert!(!shown.contains("4111") && !shown.contains("secret"), "{shown}");
    }
}
