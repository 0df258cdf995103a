//! A message as AMQP properties, and back.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use postroom::{Headers, Message, MessageId};

const TOPIC: &str = "postroom-topic";
const KEY: &str = "postroom-key";
const TENANT: &str = "tenant-id";
const AGGREGATE_TYPE: &str = "aggregate-type";
const AGGREGATE_ID: &str = "aggregate-id";
const AGGREGATE_VERSION: &str = "aggregate-version";
const OURS: [&str; 6] = [TOPIC, KEY, TENANT, AGGREGATE_TYPE, AGGREGATE_ID, AGGREGATE_VERSION];

/// Persistent, in the words of AMQP 0-9-1.
const PERSISTENT: u8 = 2;

/// The properties of a message. Ours win over headers of the same name. Fails on text that AMQP cannot carry.
pub(super) fn to_properties(message: &Message) -> Result<BasicProperties, String> {
    let mut table = FieldTable::default();
    for (name, value) in &message.headers {
        table.insert(short(name)?, long(value));
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
    let mut version = None;
    if let Some(table) = properties.headers() {
        for (name, value) in table.inner() {
            match value {
                AMQPValue::LongLongInt(number) if name.as_str() == AGGREGATE_VERSION => version = Some(*number),
                AMQPValue::LongString(text) => {
                    headers.insert(name.as_str().to_owned(), String::from_utf8_lossy(text.as_bytes()).into_owned());
                }
                AMQPValue::ShortString(text) => {
                    headers.insert(name.as_str().to_owned(), text.as_str().to_owned());
                }
                // Tables and arrays are the broker's own notes (x-death); a handler that wants them asks the broker.
                _ => {}
            }
        }
    }
    let text = |value: &Option<ShortString>| value.as_ref().map(|text| text.as_str().to_owned());
    let mut ours = OURS.map(|name| headers.remove(name));
    let mut take = |name: &str| OURS.iter().position(|our| *our == name).and_then(|index| ours[index].take());
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
