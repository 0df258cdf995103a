//! One message as one line of JSON.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use jiff::Timestamp;
use postroom::ArchivedMessage;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use uuid::Uuid;

/// The line. Columns that were null are left out.
#[derive(Serialize, Deserialize)]
struct Line {
    seq: i64,
    id: Uuid,
    occurred_at: Timestamp,
    topic: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    routing_key: Option<String>,
    content_type: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    headers: Option<Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tenant_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    aggregate_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    aggregate_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    aggregate_version: Option<i64>,
    /// The payload, if it is UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    payload: Option<String>,
    /// Any other payload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
    /// Columns whose text is not UTF-8, in base64.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    unreadable_base64: BTreeMap<String, String>,
    /// Headers that are no JSON, or have ends of lines in them, as they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    headers_text: Option<String>,
}

/// Times that a calendar can say.
fn time(us: i64) -> Timestamp {
    Timestamp::from_microsecond(us).unwrap_or(if us < 0 { Timestamp::MIN } else { Timestamp::MAX })
}

/// The line of a message, without its end.
pub(crate) fn write(message: &ArchivedMessage) -> Result<Vec<u8>, serde_json::Error> {
    // What would not be the same afterwards, or would end the line, is kept as text.
    let plain = |text: &String| {
        let raw = RawValue::from_string(text.clone()).ok().filter(|raw| raw.get() == text)?;
        (!text.contains(['\n', '\r'])).then_some(raw)
    };
    let headers = message.headers.as_ref().and_then(plain);
    let headers_text = message.headers.clone().filter(|_| headers.is_none());
    let (payload, payload_base64) = match std::str::from_utf8(&message.payload) {
        Ok(text) => (Some(text.to_owned()), None),
        Err(_) => (None, Some(BASE64.encode(&message.payload))),
    };
    let unreadable = message.unreadable.iter().map(|(column, bytes)| (column.clone(), BASE64.encode(bytes)));
    serde_json::to_vec(&Line {
        seq: message.seq,
        id: message.id,
        occurred_at: time(message.occurred_us),
        topic: message.topic.clone(),
        kind: message.kind.clone(),
        key: message.key.clone(),
        routing_key: message.routing_key.clone(),
        content_type: message.content_type.clone(),
        headers,
        tenant_id: message.tenant_id.clone(),
        aggregate_type: message.aggregate_type.clone(),
        aggregate_id: message.aggregate_id.clone(),
        aggregate_version: message.aggregate_version,
        payload,
        payload_base64,
        unreadable_base64: unreadable.collect(),
        headers_text,
    })
}

/// The message of a line.
pub(crate) fn read(line: &[u8]) -> Result<ArchivedMessage, String> {
    let line: Line = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    let bytes = |text: &str| BASE64.decode(text).map(Bytes::from).map_err(|error| error.to_string());
    let payload = match (line.payload, line.payload_base64) {
        (Some(text), None) => Bytes::from(text),
        (None, Some(text)) => bytes(&text)?,
        _ => return Err("it has no payload, or two".to_owned()),
    };
    let unreadable = line.unreadable_base64.into_iter().map(|(column, text)| Ok((column, bytes(&text)?)));
    Ok(ArchivedMessage {
        seq: line.seq,
        id: line.id,
        topic: line.topic,
        kind: line.kind,
        payload,
        key: line.key,
        routing_key: line.routing_key,
        content_type: line.content_type,
        headers: line.headers.map(|raw| raw.get().to_owned()).or(line.headers_text),
        tenant_id: line.tenant_id,
        aggregate_type: line.aggregate_type,
        aggregate_id: line.aggregate_id,
        aggregate_version: line.aggregate_version,
        occurred_us: line.occurred_at.as_microsecond(),
        unreadable: unreadable.collect::<Result<BTreeMap<_, _>, String>>()?,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text() -> impl Strategy<Value = Option<String>> {
        proptest::option::of("\\PC{0,20}|[\\x00-\\x1f\"\\\\\u{2028}]{0,5}")
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            seq: i64, id: u128, payload: Vec<u8>, key in text(), routing_key in text(), tenant_id in text(), aggregate_id in text(),
            aggregate_version: Option<i64>, occurred_us in -62_135_596_800_000_000i64..253_402_214_400_000_000, topic in "\\PC{1,9}",
            headers in proptest::option::of("\\{\"a\": ?\"\\PC{0,9}\"\\}".prop_filter("JSON", |text| serde_json::from_str::<serde_json::Value>(text).is_ok())),
            unreadable: Vec<u8>,
        ) {
            let message = ArchivedMessage {
                seq, id: Uuid::from_u128(id), topic, kind: "order.placed".to_owned(), payload: payload.into(), key, routing_key,
                content_type: "text/plain".to_owned(), headers, tenant_id, aggregate_type: None, aggregate_id, aggregate_version,
                occurred_us, unreadable: [("topic".to_owned(), Bytes::from("x")), ("key".to_owned(), unreadable.into())].into(),
            };
            let line = write(&message).unwrap();
            prop_assert!(!line.contains(&b'\n'), "a line is a line");
            prop_assert_eq!(read(&line).unwrap(), message);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            let _ = read(&bytes);
        }
    }

    #[test]
    fn headers_keep_their_digits_and_order_and_stay_in_their_line() {
        for headers in [
            "{\"b\": 1.00000000000000000001, \"a\": \"x\\ny\", \"b\": 2}",
            "{\n  \"a\": \"b\"\n}",
            "{\"a\":\"b\"}\r\n",
            " {\"a\" : \"b\"} ",
            "{",
        ] {
            let message = ArchivedMessage { headers: Some(headers.to_owned()), ..ArchivedMessage::default() };
            let line = write(&message).unwrap();
            assert!(!line.contains(&b'\n') && !line.contains(&b'\r'));
            assert_eq!(read(&line).unwrap(), message, "{headers:?}");
        }
    }
}
