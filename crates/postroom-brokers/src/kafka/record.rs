//! Pure: a message as a record of Kafka, with what it is in headers.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use postroom::envelope::{EVENT, Envelope};
use postroom::{Message, MessageId, UNREADABLE_HEADER};
use rdkafka::message::Headers as _;

use super::progress;
use crate::cloud_events::{CloudEvents, Events, STRUCTURED, VERSION};
use crate::template::Template;
use crate::text_headers::{OCCURRED_MS, TYPE, TextHeaders};

/// The message id.
pub(super) const ID: &str = "postroom-id";
const CONTENT_TYPE: &str = "content-type";
const HEADERS: TextHeaders = TextHeaders {
    id: ID,
    content_type: CONTENT_TYPE,
    envelope: Envelope::reserving(&[ID, TYPE, CONTENT_TYPE, OCCURRED_MS]),
};
/// What the names of an event's attributes begin with.
const ATTRIBUTE: &str = "ce_";
const OF_EVENTS: TextHeaders = TextHeaders { envelope: HEADERS.envelope.and_prefix(ATTRIBUTE), ..HEADERS };

/// The name of a header, and its value.
type Pair<'m> = (Cow<'m, str>, Cow<'m, str>);

/// A name of a topic has no more. <https://github.com/apache/kafka/blob/4.0/clients/src/main/java/org/apache/kafka/common/internals/Topic.java>
const TOPIC_BYTES_MAX: usize = 249;

/// All headers of a message, and the value of its record. The record's own time is when it was sent.
/// <https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/kafka-protocol-binding.md>
pub(super) fn of<'m>(message: &'m Message, events: Option<&Events>) -> (Vec<Pair<'m>>, Bytes) {
    let Some(events) = events else { return (HEADERS.of(message), message.payload.clone()) };
    let mut headers = OF_EVENTS.of(message);
    headers.push((EVENT.into(), VERSION.into()));
    match events.mode {
        CloudEvents::Binary => {
            let attributes = events.attributes(message).into_iter();
            headers.extend(attributes.map(|(name, value)| (format!("{ATTRIBUTE}{name}").into(), value.into())));
            (headers, message.payload.clone())
        }
        CloudEvents::Structured => {
            headers.retain(|(name, _)| name != CONTENT_TYPE);
            headers.push((CONTENT_TYPE.into(), STRUCTURED.into()));
            (headers, events.structured(message))
        }
    }
}

/// A record as far as it can be read. The id is none where there is none, or none of ours.
pub(super) fn received(record: &impl rdkafka::Message) -> (Option<MessageId>, Message) {
    let mut found: Vec<(String, String)> = Vec::new();
    let mut unreadable = false;
    if let Some(headers) = record.headers() {
        for index in 0..headers.count() {
            // The client library panics on a name that is not UTF-8, which only programs without Kafka's Java client can write.
            match catch_unwind(AssertUnwindSafe(|| headers.get(index))) {
                Ok(header) => {
                    let value = String::from_utf8_lossy(header.value.unwrap_or_default()).into_owned();
                    found.push((header.key.to_owned(), value));
                }
                Err(_) => unreadable = true,
            }
        }
    }
    let key = record.key().and_then(|key| std::str::from_utf8(key).ok());
    let payload = Bytes::copy_from_slice(record.payload().unwrap_or_default());
    let (id, mut message) = message_of(&found, key, record.topic(), payload);
    if unreadable {
        message.headers.insert(UNREADABLE_HEADER.to_owned(), "the name of a header is not UTF-8".to_owned());
    }
    (id, message)
}

/// By what a record is known again, in a look at its place.
pub(super) fn print(record: &impl rdkafka::Message) -> u64 {
    let time = record.timestamp().to_millis().unwrap_or_default().to_le_bytes();
    progress::print_of([&time[..], record.key().unwrap_or_default(), record.payload().unwrap_or_default()])
}

fn message_of(
    found: &[(String, String)],
    record_key: Option<&str>,
    record_topic: &str,
    payload: Bytes,
) -> (Option<MessageId>, Message) {
    let (id, mut message) = if found.iter().any(|(name, _)| name == EVENT) {
        let is_own = |name: &str| name != EVENT && !name.starts_with(ATTRIBUTE);
        let own: Vec<_> = found.iter().filter(|(name, _)| is_own(name)).cloned().collect();
        OF_EVENTS.message(&own, payload)
    } else {
        HEADERS.message(found, payload)
    };
    if message.topic.is_empty() {
        record_topic.clone_into(&mut message.topic);
    }
    // Of a message that is not postroom's, the key of the record.
    message.key = message.key.or_else(|| record_key.map(str::to_owned));
    message.routing_key = Some(record_topic.to_owned());
    (id, message)
}

/// The topic of a message, or why it cannot have one.
pub(super) fn topic(template: &Template, message: &Message) -> Result<String, String> {
    let topic = template.of(message).map_err(|field| format!("the topic needs its {field}, and it has none"))?;
    check_topic(&topic)?;
    Ok(topic)
}

/// Whether Kafka can have a topic of this name.
pub(super) fn check_topic(topic: &str) -> Result<(), String> {
    if topic.is_empty() || topic.len() > TOPIC_BYTES_MAX || matches!(topic, "." | "..") || !topic.chars().all(is_legal)
    {
        let shown: String = topic.chars().take(100).collect();
        return Err(format!("{shown:?} ({} bytes) can be no topic: {RULE}", topic.len()));
    }
    Ok(())
}

/// Whether it can be a part of such a name.
pub(super) fn check_part(part: &str) -> Result<(), String> {
    let is_right = part.len() <= TOPIC_BYTES_MAX && part.chars().all(is_legal);
    if is_right { Ok(()) } else { Err(format!("{part:?} can be in no topic: {RULE}")) }
}

/// Why nothing can be done with a topic.
pub(super) fn no_such_topic(topic: &str) -> String {
    format!(
        "topic {topic:?} does not exist; create it with `kafka-topics.sh --create --topic {topic} --partitions … --replication-factor …`"
    )
}

const RULE: &str = "a name has 1 to 249 letters, digits, dots, underscores and hyphens, and nothing else";

fn is_legal(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._-".contains(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_message_is_stands_in_headers() {
        let message = Message::new("orders", "order.placed", "x")
            .key("k")
            .tenant("t")
            .header("postroom-id", "forged")
            .header("n", "v");
        let (headers, _) = of(&message, None);
        let value = |wanted: &str| {
            headers.iter().filter(|(name, _)| name == wanted).map(|(_, value)| value.as_ref()).collect::<Vec<_>>()
        };
        assert_eq!(value(ID), [message.id.to_string()]);
        assert_eq!((value(TYPE), value("n"), value("tenant-id")), (vec!["order.placed"], vec!["v"], vec!["t"]));
        assert_eq!((value("postroom-topic"), value("postroom-key")), (vec!["orders"], vec!["k"]));
    }

    #[test]
    fn what_was_sent_is_what_is_received() {
        let message = Message::new("orders", "order.placed", "x")
            .key("k")
            .tenant("t")
            .aggregate("order", "o-1", 7)
            .header("postroom-id", "forged")
            .header("n", "v");
        let sent: Vec<(String, String)> =
            of(&message, None).0.into_iter().map(|(name, value)| (name.into_owned(), value.into_owned())).collect();
        let (id, received) = message_of(&sent, Some("k"), "shop.orders", Bytes::from_static(b"x"));
        assert_eq!(id, Some(message.id));
        let expected = Message { routing_key: Some("shop.orders".to_owned()), ..message.clone() };
        assert_eq!(format!("{received:?}"), format!("{expected:?}"));
        let (id, foreign) = message_of(&[], Some("key"), "shop.orders", Bytes::new());
        assert_eq!((id, foreign.topic.as_str(), foreign.key.as_deref()), (None, "shop.orders", Some("key")));
        let mark = [(UNREADABLE_HEADER.to_owned(), "x".to_owned())];
        assert!(!message_of(&mark, None, "t", Bytes::new()).1.headers.contains_key(UNREADABLE_HEADER));
    }

    #[test]
    fn an_event_is_received_as_the_message_that_it_was() {
        let events = |mode| Events { mode, source: "/shop".to_owned() };
        let message = Message::new("orders", "order.placed", "x")
            .key("k")
            .header("ce_id", "forged")
            .header("traceparent", "00-1-2-01");
        let (headers, value) = of(&message, Some(&events(CloudEvents::Binary)));
        let sent: Vec<(String, String)> =
            headers.into_iter().map(|(name, value)| (name.into_owned(), value.into_owned())).collect();
        let values = |wanted: &str| -> Vec<&str> {
            sent.iter().filter(|(name, _)| name == wanted).map(|(_, value)| value.as_str()).collect()
        };
        assert_eq!((values("ce_id"), values("ce_source")), (vec![message.id.to_string().as_str()], vec!["/shop"]));
        let (id, received) = message_of(&sent, Some("k"), "orders", value);
        let expected = Message { routing_key: Some("orders".to_owned()), ..message.clone() };
        assert_eq!((id, format!("{received:?}")), (Some(message.id), format!("{expected:?}")));
        let by_hand = Message::new("orders", "k", "x").header("ce_specversion", "1.0").header("ce_id", "7");
        let by_hand = by_hand.header(EVENT, "forged");
        let sent: Vec<(String, String)> =
            of(&by_hand, None).0.into_iter().map(|(name, value)| (name.into_owned(), value.into_owned())).collect();
        let (_, received) = message_of(&sent, None, "orders", Bytes::from_static(b"x"));
        assert_eq!(received.headers, by_hand.headers, "headers of its own are not taken for ours");
        let (headers, value) = of(&message, Some(&events(CloudEvents::Structured)));
        let types: Vec<_> = headers.iter().filter(|(name, _)| name == CONTENT_TYPE).map(|(_, value)| value).collect();
        assert!(types == [STRUCTURED] && value.starts_with(b"{"), "{types:?}");
    }

    #[test]
    fn only_names_that_kafka_takes_are_topics() {
        let template = Template::parse("{tenant_id}.{topic}").unwrap();
        let of = |tenant: &str| topic(&template, &Message::new("orders", "k", "x").tenant(tenant));
        assert_eq!(of("t-1").unwrap(), "t-1.orders");
        for tenant in ["ä", "a b", "a/b", "a\0", &"x".repeat(300)] {
            assert!(of(tenant).unwrap_err().contains("can be no topic"), "{tenant}");
        }
        assert!(topic(&template, &Message::new("orders", "k", "x")).unwrap_err().contains("tenant_id"));
        assert!(check_topic("..").is_err());
    }
}
