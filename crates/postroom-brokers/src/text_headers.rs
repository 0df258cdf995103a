//! Pure: a message beside its payload as pairs of text, for brokers whose headers know nothing else.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use postroom::envelope::{Envelope, HeaderValue};
use postroom::{Message, MessageId, UNREADABLE_HEADER};

/// What kind of message it is.
pub(crate) const TYPE: &str = "postroom-type";
/// When it happened, in milliseconds since 1970.
pub(crate) const OCCURRED_MS: &str = "postroom-occurred-ms";

/// How one broker's pairs are called.
pub(crate) struct TextHeaders {
    /// The message id.
    pub id: &'static str,
    pub content_type: &'static str,
    /// Reserves those two, [`TYPE`] and [`OCCURRED_MS`], and what the broker takes for itself.
    pub envelope: Envelope,
}

impl TextHeaders {
    /// All pairs of a message.
    pub fn of<'m>(&self, message: &'m Message) -> Vec<(Cow<'m, str>, Cow<'m, str>)> {
        let mut all = vec![
            (self.id.into(), message.id.to_string().into()),
            (TYPE.into(), message.kind.as_str().into()),
            (self.content_type.into(), message.content_type.as_str().into()),
        ];
        let occurred = message.occurred_at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
        all.extend(occurred.map(|since| (OCCURRED_MS.into(), since.as_millis().to_string().into())));
        all.extend(self.envelope.headers(message).into_iter().map(|(name, value)| match value {
            HeaderValue::Text(text) => (name, text),
            HeaderValue::Number(number) => (name, number.to_string().into()),
        }));
        all
    }

    /// The message of these pairs as far as they can be read, without a routing key. The id is none where there is none, or none of ours;
    /// the topic is empty where there is none.
    pub fn message(&self, found: &[(String, String)], payload: Bytes) -> (Option<MessageId>, Message) {
        let (mut id, mut kind, mut content_type, mut occurred_at) = (None, None, None, None);
        let mut rest = Vec::with_capacity(found.len());
        for (name, value) in found {
            match name.as_str() {
                name if name == self.id => id = value.parse::<MessageId>().ok(),
                TYPE => kind = Some(value.clone()),
                name if name == self.content_type => content_type = Some(value.clone()),
                OCCURRED_MS => {
                    let since = value.parse().ok().map(Duration::from_millis);
                    occurred_at = since.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
                }
                // Nobody but this side says that.
                UNREADABLE_HEADER => {}
                _ => rest.push((name.as_str(), of_wire(name, value))),
            }
        }
        let opened = self.envelope.open(rest);
        let message = Message {
            id: id.unwrap_or_else(MessageId::new),
            topic: opened.topic.unwrap_or_default(),
            kind: kind.unwrap_or_default(),
            key: opened.key,
            routing_key: None,
            content_type: content_type.unwrap_or_else(|| "application/octet-stream".to_owned()),
            tenant_id: opened.tenant_id,
            aggregate_type: opened.aggregate_type,
            aggregate_id: opened.aggregate_id,
            aggregate_version: opened.aggregate_version,
            occurred_at,
            delay: Duration::ZERO,
            headers: opened.headers,
            payload,
        };
        (id, message)
    }
}

/// The one column that is a number is digits on the wire.
fn of_wire<'m>(name: &str, value: &'m str) -> HeaderValue<'m> {
    let number = (name == Envelope::AGGREGATE_VERSION).then(|| value.parse().ok()).flatten();
    number.map_or(HeaderValue::Text(value.into()), HeaderValue::Number)
}
