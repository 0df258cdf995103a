//! Pure: a message as a record of Kafka, with what it is in headers.

use std::borrow::Cow;
use std::time::SystemTime;

use postroom::Message;
use postroom::envelope::{Envelope, HeaderValue};

use crate::template::Template;

/// The message id.
pub(super) const ID: &str = "postroom-id";
const TYPE: &str = "postroom-type";
const CONTENT_TYPE: &str = "content-type";
/// When it happened, in milliseconds since 1970. The record's own time is when it was sent.
const OCCURRED_MS: &str = "postroom-occurred-ms";
const ENVELOPE: Envelope = Envelope::reserving(&[ID, TYPE, CONTENT_TYPE, OCCURRED_MS]);

/// A name of a topic has no more. <https://github.com/apache/kafka/blob/4.0/clients/src/main/java/org/apache/kafka/common/internals/Topic.java>
const TOPIC_BYTES_MAX: usize = 249;

/// All headers of a message.
pub(super) fn headers(message: &Message) -> Vec<(Cow<'_, str>, Cow<'_, str>)> {
    let mut all = vec![
        (ID.into(), message.id.to_string().into()),
        (TYPE.into(), message.kind.as_str().into()),
        (CONTENT_TYPE.into(), message.content_type.as_str().into()),
    ];
    let occurred = message.occurred_at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    all.extend(occurred.map(|since| (OCCURRED_MS.into(), since.as_millis().to_string().into())));
    all.extend(ENVELOPE.headers(message).into_iter().map(|(name, value)| match value {
        HeaderValue::Text(text) => (name, text),
        HeaderValue::Number(number) => (name, number.to_string().into()),
    }));
    all
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
        let headers = headers(&message);
        let value = |wanted: &str| {
            headers.iter().filter(|(name, _)| name == wanted).map(|(_, value)| value.as_ref()).collect::<Vec<_>>()
        };
        assert_eq!(value(ID), [message.id.to_string()]);
        assert_eq!((value(TYPE), value("n"), value("tenant-id")), (vec!["order.placed"], vec!["v"], vec!["t"]));
        assert_eq!((value("postroom-topic"), value("postroom-key")), (vec!["orders"], vec!["k"]));
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
