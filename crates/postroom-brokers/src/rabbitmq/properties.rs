//! A message as AMQP properties, and back.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use postroom::envelope::{Envelope, HeaderValue};
use postroom::{Message, MessageId};

/// Where a message that was sent over AMQP 1.0 has its type.
const TYPE: &str = "postroom-type";
/// RabbitMQ takes the others for lists of further routing keys, and closes the channel over anything else.
const ENVELOPE: Envelope = Envelope::reserving(&["CC", "BCC", TYPE]);

/// Persistent, in the words of AMQP 0-9-1.
const PERSISTENT: u8 = 2;

/// The properties of a message. Fails on text that AMQP cannot carry.
pub(super) fn to_properties(message: &Message) -> Result<BasicProperties, String> {
    let mut table = FieldTable::default();
    for (name, value) in ENVELOPE.headers(message) {
        let value = match value {
            HeaderValue::Text(text) => AMQPValue::LongString(LongString::from(text.as_bytes().to_vec())),
            HeaderValue::Number(number) => AMQPValue::LongLongInt(number),
        };
        table.insert(short(&name)?, value);
    }
    let mut properties = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_message_id(short(&message.id.to_string())?)
        .with_type(short(&message.kind)?)
        .with_content_type(short(&message.content_type)?)
        .with_headers(table);
    if let Some(since) = message.occurred_at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok()) {
        properties = properties.with_timestamp(since.as_secs());
    }
    Ok(properties)
}

/// A received message as far as it can be read. The id is none where there is none, or none of ours.
pub(super) fn from_delivery(delivery: lapin::message::Delivery) -> (Option<MessageId>, Message) {
    let properties = &delivery.properties;
    let id: Option<MessageId> = properties.message_id().as_ref().and_then(|id| id.as_str().parse().ok());
    let table = properties.headers().as_ref().map(|table| table.inner());
    // Tables and arrays are the broker's own notes (x-death); a handler that needs them asks the broker.
    let value = |value| match value {
        &AMQPValue::LongLongInt(number) => Some(HeaderValue::Number(number)),
        AMQPValue::LongString(text) => Some(HeaderValue::Text(String::from_utf8_lossy(text.as_bytes()))),
        AMQPValue::ShortString(text) => Some(HeaderValue::Text(text.as_str().into())),
        _ => None,
    };
    let headers = table.into_iter().flatten().filter_map(|(name, held)| Some((name.as_str(), value(held)?)));
    let opened = ENVELOPE.open(headers.filter(|(name, _)| *name != TYPE));
    let kind_over_1_0 = table.and_then(|table| table.get(TYPE)).and_then(value).and_then(|value| match value {
        HeaderValue::Text(text) => Some(text.into_owned()),
        HeaderValue::Number(_) => None,
    });
    let text = |value: &Option<ShortString>| value.as_ref().map(|text| text.as_str().to_owned());
    let message = Message {
        id: id.unwrap_or_else(MessageId::new),
        topic: opened.topic.unwrap_or_default(),
        kind: text(properties.kind()).or(kind_over_1_0).unwrap_or_default(),
        key: opened.key,
        routing_key: Some(delivery.routing_key.as_str().to_owned()),
        content_type: text(properties.content_type()).unwrap_or_else(|| "application/octet-stream".to_owned()),
        tenant_id: opened.tenant_id,
        aggregate_type: opened.aggregate_type,
        aggregate_id: opened.aggregate_id,
        aggregate_version: opened.aggregate_version,
        occurred_at: properties
            .timestamp()
            .and_then(|seconds| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))),
        delay: Duration::ZERO,
        headers: opened.headers,
        payload: Bytes::from(delivery.data),
    };
    (id, message)
}

fn short(text: &str) -> Result<ShortString, String> {
    ShortString::try_new(text).map_err(|error| format!("{error}: {} bytes", text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a subscription makes of what the sink sends.
    fn round_trip(message: &Message) -> Message {
        let properties = to_properties(message).unwrap();
        let mut delivery = lapin::message::Delivery::mock(
            1,
            ShortString::from(""),
            ShortString::from(message.address()),
            false,
            message.payload.to_vec(),
        );
        delivery.properties = properties;
        from_delivery(delivery).1
    }

    #[test]
    fn a_message_comes_back_as_it_went() {
        let plain =
            Message::new("orders", "order.placed", "x").header("n", "v").header("CC", "own").header("tenant-id", "own");
        let full = plain.clone().key("k").tenant("t").aggregate("a", "a-1", 7);
        for mut sent in [plain, full] {
            sent.routing_key = Some("r".to_owned());
            let came = round_trip(&sent);
            assert_eq!(came.headers, sent.headers);
            let columns = |m: &Message| {
                let aggregate = (m.aggregate_type.clone(), m.aggregate_id.clone(), m.aggregate_version);
                (m.topic.clone(), m.key.clone(), m.tenant_id.clone(), aggregate)
            };
            assert_eq!(columns(&came), columns(&sent));
        }
    }
}
