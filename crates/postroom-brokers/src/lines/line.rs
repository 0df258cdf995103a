//! Pure: one message as a line of JSON, and how to recognize such a line that was cut short.

use postroom::Message;
use serde::Serialize;

/// How every line begins; the order of the fields below is part of the format, because a torn line is recognized by it.
pub(super) const BEGINNING: &[u8] = b"{\"aggregate_id\":";

#[derive(Serialize)]
struct Line<'a> {
    aggregate_id: &'a Option<String>,
    aggregate_type: &'a Option<String>,
    aggregate_version: Option<i64>,
    content_type: &'a str,
    headers: &'a postroom::Headers,
    id: postroom::MessageId,
    key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_bytes: Option<&'a [u8]>,
    routing_key: &'a str,
    tenant_id: &'a Option<String>,
    topic: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
}

/// The line of a message, without the newline.
pub(super) fn of(message: &Message) -> Result<Vec<u8>, serde_json::Error> {
    let text = std::str::from_utf8(&message.payload).ok();
    serde_json::to_vec(&Line {
        aggregate_id: &message.aggregate_id,
        aggregate_type: &message.aggregate_type,
        aggregate_version: message.aggregate_version,
        content_type: &message.content_type,
        headers: &message.headers,
        id: message.id,
        key: message.ordering_key(),
        payload: text,
        payload_bytes: if text.is_none() { Some(&message.payload) } else { None },
        routing_key: message.address(),
        tenant_id: &message.tenant_id,
        topic: &message.topic,
        kind: &message.kind,
    })
}

/// Whether a line that begins with these bytes may be one of ours. `first` may be shorter than a beginning, when the line is.
pub(super) fn may_be_ours(first: &[u8]) -> bool {
    let length = first.len().min(BEGINNING.len());
    !first.is_empty() && first[..length] == BEGINNING[..length]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_has_the_beginning_by_which_a_torn_one_is_recognized() {
        let plain = Message::new("orders", "order.placed", "x");
        let whole = Message::new("orders", "order.placed", vec![0xff, 0]).key("k").aggregate("order", "o-1", 7);
        for message in [plain, whole] {
            let line = of(&message).unwrap();
            assert!(line.starts_with(BEGINNING) && !line.contains(&b'\n'), "{}", String::from_utf8_lossy(&line));
            assert!((1..line.len()).all(|length| may_be_ours(&line[..length])));
        }
        assert!(!may_be_ours(b"") && !may_be_ours(b"{}") && !may_be_ours(b"a log line"));
    }
}
