//! Pure: how large the parts of a message may be, checked when it is enqueued and again by the tables' constraints.

use crate::message::Message;

/// Largest payload: 1 MiB. Put larger content into object storage, and its address into the message.
pub const PAYLOAD_BYTES_MAX: usize = 1_048_576;
/// Most bytes of all headers together, as JSON text; the same limit holds for every way of writing.
pub const HEADERS_BYTES_MAX: usize = 65_536;
/// Longest key, aggregate id or tenant id in bytes. Keys are indexed where a message waits for its retry.
pub const KEY_BYTES_MAX: usize = 512;
/// Longest topic, type, routing key or aggregate type in bytes: AMQP 0-9-1 carries a routing key as a short string.
pub const NAME_BYTES_MAX: usize = 255;
/// Longest content type in bytes.
pub const CONTENT_TYPE_BYTES_MAX: usize = 255;

/// A part of a message that no store accepts. Nothing was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} of message {id} {problem}")]
pub struct LimitExceeded {
    id: crate::MessageId,
    what: &'static str,
    problem: String,
}

impl LimitExceeded {
    /// Which part was rejected: `payload`, `key`, `headers`, …
    pub fn what(&self) -> &'static str {
        self.what
    }
}

pub(crate) fn check(message: &Message) -> Result<(), LimitExceeded> {
    let refuse = |what, problem| Err(LimitExceeded { id: message.id, what, problem });
    let text = |what, text: Option<&str>, max: usize, must_be_there: bool| {
        let Some(text) = text else { return Ok(()) };
        if must_be_there && text.is_empty() {
            return refuse(what, "is empty".to_owned());
        }
        if text.len() > max {
            return refuse(what, format!("has {} bytes, the limit is {max}", text.len()));
        }
        if text.contains('\0') {
            return refuse(what, "contains a NUL character".to_owned());
        }
        Ok(())
    };
    text("topic", Some(&message.topic), NAME_BYTES_MAX, true)?;
    text("type", Some(&message.kind), NAME_BYTES_MAX, true)?;
    text("routing key", message.routing_key.as_deref(), NAME_BYTES_MAX, false)?;
    text("content type", Some(&message.content_type), CONTENT_TYPE_BYTES_MAX, true)?;
    text("key", message.key.as_deref(), KEY_BYTES_MAX, true)?;
    text("tenant id", message.tenant_id.as_deref(), KEY_BYTES_MAX, false)?;
    text("aggregate type", message.aggregate_type.as_deref(), NAME_BYTES_MAX, false)?;
    text("aggregate id", message.aggregate_id.as_deref(), KEY_BYTES_MAX, true)?;
    if message.payload.len() > PAYLOAD_BYTES_MAX {
        return refuse(
            "payload",
            format!(
                "has {} bytes, the limit is {PAYLOAD_BYTES_MAX}; store large content elsewhere and send its address",
                message.payload.len()
            ),
        );
    }
    // Quotes and separators; what is escaped only adds to it.
    let at_least: usize = message.headers.iter().map(|(name, value)| name.len() + value.len() + 6).sum();
    if at_least > HEADERS_BYTES_MAX / 6 {
        let bytes = serde_json::to_string(&message.headers).map_or(usize::MAX, |text| text.len());
        if bytes > HEADERS_BYTES_MAX {
            return refuse("headers", format!("have {bytes} bytes as JSON, the limit is {HEADERS_BYTES_MAX}"));
        }
    }
    for name in message.headers.keys() {
        text("header name", Some(name), NAME_BYTES_MAX, true)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_payload_passes_and_one_byte_more_is_refused() {
        let message = Message::new("t", "k", vec![0u8; PAYLOAD_BYTES_MAX]);
        assert_eq!(message.check(), Ok(()));
        let message = Message::new("t", "k", vec![0u8; PAYLOAD_BYTES_MAX + 1]);
        assert_eq!(message.check().unwrap_err().what(), "payload");
    }

    #[test]
    fn every_part_has_a_limit() {
        let long = "x".repeat(600);
        let base = || Message::new("t", "k", "");
        let refused = |message: Message| message.check().unwrap_err().what();
        assert_eq!(refused(Message::new("", "k", "")), "topic");
        assert_eq!(refused(Message::new("t", "", "")), "type");
        assert_eq!(refused(base().key(&long)), "key");
        assert_eq!(refused(base().key("")), "key");
        assert_eq!(refused(base().routing_key(&long)), "routing key");
        assert_eq!(refused(base().tenant(&long)), "tenant id");
        assert_eq!(refused(base().aggregate("a", &long, 1)), "aggregate id");
        assert_eq!(refused(base().header(&long, "v")), "header name");
        assert_eq!(refused(base().header("h", "x".repeat(HEADERS_BYTES_MAX))), "headers");
        assert_eq!(refused(base().header("h", "\u{1}".repeat(HEADERS_BYTES_MAX / 6))), "headers", "as JSON");
        let many = (0..1000).fold(base(), |message, n| message.header(format!("h{n}"), "v"));
        assert_eq!(many.check(), Ok(()));
        assert_eq!(refused(base().key("a\0b")), "key");
    }
}
