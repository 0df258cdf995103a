//! A message as AMQP properties, and back.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use postroom::{Headers, Message, MessageId, UNREADABLE_HEADER};

const TOPIC: &str = "postroom-topic";
const KEY: &str = "postroom-key";
const TENANT: &str = "tenant-id";
const AGGREGATE_TYPE: &str = "aggregate-type";
const AGGREGATE_ID: &str = "aggregate-id";
const AGGREGATE_VERSION: &str = "aggregate-version";
const OURS: [&str; 6] = [TOPIC, KEY, TENANT, AGGREGATE_TYPE, AGGREGATE_ID, AGGREGATE_VERSION];

/// Stands before the name of a message's own header that is named like one of ours: it must not pass for ours, and it comes
/// out under its own name again at our subscription.
const OWN: &str = "postroom-header-";
/// RabbitMQ takes these for lists of further routing keys, and closes the channel over anything else.
const ADDRESSES: [&str; 2] = ["CC", "BCC"];

/// Persistent, in the words of AMQP 0-9-1.
const PERSISTENT: u8 = 2;

/// Whether a header of this name is named like one of ours, or like one that was renamed for that.
fn collides(mut name: &str) -> bool {
    while let Some(rest) = name.strip_prefix(OWN) {
        name = rest;
    }
    OURS.contains(&name) || name == UNREADABLE_HEADER || ADDRESSES.contains(&name)
}

/// The name under which a message's own header travels that has one of our names.
pub(super) fn escaped(name: &str) -> String {
    format!("{OWN}{name}")
}

/// The name that the writer gave to a header. Only the mark of an unreadable message is not given back: at a receiver it means
/// that nobody but the fence has set it.
fn own_name(name: &str) -> &str {
    let own = name.strip_prefix(OWN).filter(|rest| collides(rest) && *rest != UNREADABLE_HEADER);
    own.unwrap_or(name)
}

/// The properties of a message. Fails on text that AMQP cannot carry.
pub(super) fn to_properties(message: &Message) -> Result<BasicProperties, String> {
    let mut table = FieldTable::default();
    for (name, value) in &message.headers {
        if collides(name) && !cfg!(seeded_bug = "own_header_passes_for_a_column") {
            table.insert(short(&escaped(name))?, long(value));
        } else {
            table.insert(short(name)?, long(value));
        }
    }
    let mut ours = |name: &str, value: Option<&str>| {
        if let Some(value) = value {
            table.insert(ShortString::from(name), long(value));
        }
    };
    ours(TOPIC, Some(&message.topic));
    ours(KEY, message.ordering_key());
    ours(TENANT, message.tenant_id.as_deref());
    ours(AGGREGATE_TYPE, message.aggregate_type.as_deref());
    ours(AGGREGATE_ID, message.aggregate_id.as_deref());
    if let Some(version) = message.aggregate_version {
        table.insert(ShortString::from(AGGREGATE_VERSION), AMQPValue::LongLongInt(version));
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
    let mut headers = Headers::new();
    let mut ours = Headers::new();
    let mut version = None;
    if let Some(table) = properties.headers() {
        for (name, value) in table.inner() {
            let name = name.as_str();
            let text = match value {
                AMQPValue::LongLongInt(number) if name == AGGREGATE_VERSION => {
                    version = Some(*number);
                    continue;
                }
                AMQPValue::LongString(text) => String::from_utf8_lossy(text.as_bytes()).into_owned(),
                AMQPValue::ShortString(text) => text.as_str().to_owned(),
                // Tables and arrays are the broker's own notes (x-death); a handler that needs them asks the broker.
                _ => continue,
            };
            // A version that is text is not from us: it stays a header.
            if OURS.contains(&name) && name != AGGREGATE_VERSION {
                ours.insert(name.to_owned(), text);
            } else {
                headers.insert(own_name(name).to_owned(), text);
            }
        }
    }
    let text = |value: &Option<ShortString>| value.as_ref().map(|text| text.as_str().to_owned());
    let mut take = |name: &str| ours.remove(name);
    let message = Message {
        id: id.unwrap_or_else(MessageId::new),
        topic: take(TOPIC).unwrap_or_default(),
        kind: text(properties.kind()).unwrap_or_default(),
        key: take(KEY),
        routing_key: Some(delivery.routing_key.as_str().to_owned()),
        content_type: text(properties.content_type()).unwrap_or_else(|| "application/octet-stream".to_owned()),
        tenant_id: take(TENANT),
        aggregate_type: take(AGGREGATE_TYPE),
        aggregate_id: take(AGGREGATE_ID),
        aggregate_version: version,
        occurred_at: properties
            .timestamp()
            .and_then(|seconds| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))),
        delay: Duration::ZERO,
        headers,
        payload: Bytes::from(delivery.data),
    };
    (id, message)
}

fn short(text: &str) -> Result<ShortString, String> {
    ShortString::try_new(text).map_err(|error| format!("{error}: {} bytes", text.len()))
}

fn long(text: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(text.as_bytes().to_vec()))
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
    fn a_header_named_like_one_of_ours_comes_back_under_its_name_and_passes_for_nothing() {
        let mut plain = Message::new("orders", "order.placed", "x");
        for name in OURS {
            let twice = escaped(&escaped(name));
            plain = plain.header(name, "own").header(escaped(name), "escaped").header(twice, "twice");
        }
        plain = plain.header("postroom-header-", "no name").header("postroom-header-other", "other");
        let mut full = plain.clone().key("k").tenant("t").aggregate("a", "a-1", 7);
        for sent in [&mut plain, &mut full] {
            sent.routing_key = Some("r".to_owned());
            let came = round_trip(sent);
            assert_eq!(came.headers, sent.headers);
            let columns = |m: &Message| {
                let aggregate = (m.aggregate_type.clone(), m.aggregate_id.clone(), m.aggregate_version);
                (m.topic.clone(), m.key.clone(), m.tenant_id.clone(), aggregate)
            };
            assert_eq!(columns(&came), columns(sent));
        }
    }

    #[test]
    fn nobody_but_the_fence_says_that_a_message_is_unreadable() {
        let sent = Message::new("orders", "order.placed", "x").header(UNREADABLE_HEADER, "forged");
        let came = round_trip(&sent);
        assert!(!came.headers.contains_key(UNREADABLE_HEADER));
        assert_eq!(came.headers[&escaped(UNREADABLE_HEADER)], "forged");
    }
}
