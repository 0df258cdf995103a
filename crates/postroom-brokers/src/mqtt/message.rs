//! Pure: a message as a publication: its topic, its content type and user properties, and the payload.

use bytes::Bytes;
use postroom::envelope::{EVENT, Envelope};
use postroom::{Message, MessageId, UNREADABLE_HEADER};

use super::packet::{Publish, STRING_BYTES_MAX, publish_head};
use crate::cloud_events::{CloudEvents, Events, STRUCTURED, VERSION};
use crate::template::Template;
use crate::text_headers::{OCCURRED_MS, TYPE, TextHeaders};

const ID: &str = "postroom-id";
/// A property of its own in MQTT 5.
const CONTENT_TYPE: &str = "content-type";
const PAIRS: TextHeaders = TextHeaders {
    id: ID,
    content_type: CONTENT_TYPE,
    envelope: Envelope::reserving(&[ID, TYPE, CONTENT_TYPE, OCCURRED_MS]),
};

const OF_EVENTS: TextHeaders = TextHeaders { envelope: Envelope::reserving(TAKEN_IN_EVENTS), ..PAIRS };
const TAKEN_IN_EVENTS: &[&str] = &[
    ID,
    TYPE,
    CONTENT_TYPE,
    OCCURRED_MS,
    "specversion",
    "id",
    "source",
    "type",
    "subject",
    "partitionkey",
    "tenantid",
    "topic",
    "aggregatetype",
    "aggregateversion",
    "traceparent",
    "tracestate",
    "time",
];
/// Attributes of an event are pairs under their own names, which no header of a message's own may have beside them.
/// <https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/mqtt-protocol-binding.md>
const ATTRIBUTES: &[&str] = TAKEN_IN_EVENTS.split_at(4).1;

/// What is in front of a packet at most: its kind and its length.
const FRAME_BYTES: usize = 5;

/// The publication of a message, or why there can be none. `packet_bytes_max` is what the broker takes.
pub(super) fn publication(
    template: &Template,
    message: &Message,
    (retain, events): (bool, Option<&Events>),
    packet_bytes_max: Option<usize>,
) -> Result<Publish, String> {
    let topic = template.of(message).map_err(|field| format!("the topic needs its {field}, and it has none"))?;
    check_topic(&topic)?;
    let (mut pairs, mut payload) = (PAIRS.of(message), message.payload.clone());
    if let Some(events) = events {
        pairs = OF_EVENTS.of(message);
        pairs.push((EVENT.into(), VERSION.into()));
        match events.mode {
            CloudEvents::Binary => {
                let attributes = events.attributes(message).into_iter();
                pairs.extend(attributes.map(|(name, value)| (name.into(), value.into())));
            }
            CloudEvents::Structured => {
                pairs.retain(|(name, _)| name != CONTENT_TYPE);
                pairs.push((CONTENT_TYPE.into(), STRUCTURED.into()));
                payload = events.structured(message);
            }
        }
    }
    let (mut content_type, mut user_properties) = (None, Vec::new());
    for (name, value) in pairs {
        if name.len() > STRING_BYTES_MAX || value.len() > STRING_BYTES_MAX {
            return Err(format!("a header has more than {STRING_BYTES_MAX} bytes, which MQTT does not carry"));
        }
        if let Some(c) = name.chars().chain(value.chars()).find(|c| !is_carried(*c)) {
            return Err(format!(
                "a header has the character {:?}, for which brokers of MQTT end the connection",
                c.to_string()
            ));
        }
        match name.as_ref() {
            CONTENT_TYPE => content_type = Some(value.into_owned()),
            _ => user_properties.push((name.into_owned(), value.into_owned())),
        }
    }
    let publication = Publish {
        topic,
        packet_id: Some(0),
        duplicate: false,
        retain,
        content_type,
        user_properties,
        unreadable: false,
        payload,
    };
    let bytes = FRAME_BYTES + publish_head(&publication).len() + publication.payload.len();
    let most = packet_bytes_max.unwrap_or(super::packet::PACKET_BYTES_MAX);
    if bytes > most {
        return Err(format!(
            "with its headers it has {bytes} bytes, and the broker takes packets of {most} (maximum packet size)"
        ));
    }
    Ok(publication)
}

/// Brokers may end a connection for a string with another one: control characters, and those that Unicode leaves to programs.
/// <https://docs.oasis-open.org/mqtt/mqtt/v5.0/os/mqtt-v5.0-os.html#_Toc3901010>
fn is_carried(c: char) -> bool {
    !c.is_control() && !('\u{fdd0}'..='\u{fdef}').contains(&c) && u32::from(c) & 0xfffe != 0xfffe
}

/// Whether a message can be published to it.
pub(super) fn check_topic(topic: &str) -> Result<(), String> {
    let shown = || topic.chars().take(100).collect::<String>();
    if topic.is_empty()
        || topic.len() > STRING_BYTES_MAX
        || topic.contains(['+', '#'])
        || !topic.chars().all(is_carried)
    {
        return Err(format!(
            "{:?} ({} bytes) can be no topic: it must have 1 to {STRING_BYTES_MAX} bytes, none of + and #, and no control characters",
            shown(),
            topic.len()
        ));
    }
    Ok(())
}

/// Whether it can be subscribed to. <https://docs.oasis-open.org/mqtt/mqtt/v5.0/os/mqtt-v5.0-os.html#_Toc3901241>
pub(super) fn check_filter(filter: &str) -> Result<(), String> {
    let levels: Vec<&str> = filter.split('/').collect();
    let misplaced = levels.iter().enumerate().any(|(at, level)| {
        (level.contains('+') && *level != "+") || (level.contains('#') && (*level != "#" || at + 1 < levels.len()))
    });
    if filter.is_empty() || filter.len() > STRING_BYTES_MAX || filter.contains('\0') || misplaced {
        return Err(format!(
            "{filter:?} is no topic filter: + stands for one level, and # for all that follow, at its end"
        ));
    }
    Ok(())
}

/// A publication as far as it can be read. The id is none where there is none, or none of ours.
pub(super) fn received(publication: Publish) -> (Option<MessageId>, Message) {
    let Publish { topic, content_type, user_properties, unreadable, payload, .. } = publication;
    let mut found = user_properties;
    found.retain(|(name, _)| name != CONTENT_TYPE);
    found.extend(content_type.map(|text| (CONTENT_TYPE.to_owned(), text)));
    // Of a payload that is a small part of what was read, only that is kept.
    let payload = Bytes::copy_from_slice(&payload);
    let (id, mut message) = if found.iter().any(|(name, _)| name == EVENT) {
        found.retain(|(name, _)| name != EVENT && !ATTRIBUTES.contains(&name.as_str()));
        OF_EVENTS.message(&found, payload)
    } else {
        PAIRS.message(&found, payload)
    };
    if message.topic.is_empty() {
        message.topic.clone_from(&topic);
    }
    message.routing_key = Some(topic);
    if unreadable {
        message.headers.insert(UNREADABLE_HEADER.to_owned(), "a text in it is not UTF-8".to_owned());
    }
    (id, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(text: &str) -> Template {
        Template::parse(text).unwrap()
    }

    #[test]
    fn what_was_sent_is_what_is_received() {
        let message = Message::new("orders", "order.placed", "x\0")
            .key("k")
            .tenant("t")
            .aggregate("order", "o-1", 7)
            .content_type("text/plain")
            .header("postroom-id", "forged")
            .header("n ä", "v:");
        let sent = publication(&template("shop/{topic}"), &message, (false, None), None).unwrap();
        assert_eq!((sent.topic.as_str(), sent.content_type.as_deref()), ("shop/orders", Some("text/plain")));
        let (id, received) = received(sent);
        assert_eq!(id, Some(message.id));
        let expected = Message { routing_key: Some("shop/orders".to_owned()), ..message };
        assert_eq!(format!("{received:?}"), format!("{expected:?}"));
    }

    #[test]
    fn an_event_is_received_as_the_message_that_it_was() {
        let events = |mode| Events { mode, source: "/shop".to_owned() };
        let message = Message::new("orders", "order.placed", "x")
            .key("k")
            .aggregate("order", "o-1", 7)
            .header("id", "forged")
            .header("traceparent", "00-1-2-01");
        let sent = |mode| publication(&template("shop"), &message, (false, Some(&events(mode))), None).unwrap();
        let event = sent(CloudEvents::Binary);
        for name in ATTRIBUTES {
            assert!(event.user_properties.iter().filter(|(found, _)| found == name).count() <= 1, "{name}");
        }
        assert!(event.user_properties.contains(&("id".to_owned(), message.id.to_string())));
        let (id, received) = received(event);
        let expected = Message { routing_key: Some("shop".to_owned()), ..message.clone() };
        assert_eq!((id, format!("{received:?}")), (Some(message.id), format!("{expected:?}")));
        let by_hand = Message::new("orders", "k", "x").header("specversion", "1.0").header("id", "7");
        let by_hand = by_hand.header(EVENT, "forged");
        let (_, came) = super::received(publication(&template("shop"), &by_hand, (false, None), None).unwrap());
        assert_eq!(came.headers, by_hand.headers, "headers of its own are not taken for ours");
        let event = sent(CloudEvents::Structured);
        assert!(event.content_type.as_deref() == Some(STRUCTURED) && event.payload.starts_with(b"{"), "{event:?}");
    }

    #[test]
    fn what_mqtt_does_not_carry_is_told() {
        let of = |message: &Message, most| publication(&template("{key}"), message, (false, None), most).unwrap_err();
        let message = Message::new("orders", "k", "x".repeat(100));
        assert!(of(&message, None).contains("needs its key"));
        for key in ["a+", "#", "\0", "\u{ffff}"] {
            assert!(of(&message.clone().key(key), None).contains("can be no topic"), "{key}");
        }
        assert!(of(&message.clone().key("k"), Some(100)).contains("maximum packet size"));
        assert!(of(&message.clone().key("k").header("n", "a\n"), None).contains("end the connection"));
        assert!(of(&message.key("k").header("n", "x".repeat(70_000)), None).contains("65535"));
    }

    #[test]
    fn filters_are_checked() {
        for filter in ["a", "#", "+", "a/+/b", "a/#", "/", "$share/g/a"] {
            assert!(check_filter(filter).is_ok(), "{filter}");
        }
        for filter in ["", "a#", "a/#/b", "a+/b", "a\0"] {
            assert!(check_filter(filter).is_err(), "{filter}");
        }
    }
}
