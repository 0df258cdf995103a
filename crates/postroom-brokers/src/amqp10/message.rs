//! Pure: a message as the sections of AMQP 1.0, and back.
//! <https://docs.oasis-open.org/amqp/core/v1.0/os/amqp-core-messaging-v1.0-os.html#section-message-format>

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use bytes::{BufMut, Bytes, BytesMut};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use postroom::envelope::{EVENT, Envelope, HeaderValue};
use postroom::{Message, MessageId, UNREADABLE_HEADER};

use super::types::{Descriptor, Field, List, Reader, Value, put, put_composite, put_descriptor};
use crate::cloud_events::{CloudEvents, Events, STRUCTURED, VERSION};
use crate::template::Template;

const HEADER: u64 = 0x70;
const MESSAGE_ANNOTATIONS: u64 = 0x72;
const PROPERTIES: u64 = 0x73;
const APPLICATION_PROPERTIES: u64 = 0x74;
const DATA: u64 = 0x75;
const SEQUENCE: u64 = 0x76;
const VALUE: u64 = 0x77;

/// What kind of message it is; AMQP 1.0 has no place of its own for it.
const TYPE: &str = "postroom-type";
const ENVELOPE: Envelope = Envelope::reserving(&[TYPE]);
/// What the names of an event's attributes begin with.
/// <https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/amqp-protocol-binding.md>
const ATTRIBUTE: &str = "cloudEvents:";
const OF_EVENTS: Envelope = ENVELOPE.and_prefix("cloudevents:");
/// What Azure Service Bus chooses a partition by.
const PARTITION_KEY: &str = "x-opt-partition-key";

/// What RabbitMQ notes of a message, and of one that was sent over AMQP 0-9-1. <https://www.rabbitmq.com/docs/conversions>
const ROUTING_KEY: &str = "x-routing-key";
const BASIC_TYPE: &str = "x-basic-type";
/// Only messages of streams have it.
const STREAM_OFFSET: &str = "x-stream-offset";
/// The longest routing key of AMQP 0-9-1, whose consumers RabbitMQ ends with each message that has a longer one.
const ROUTING_KEY_BYTES_MAX: usize = 255;

/// How messages are written.
#[derive(Debug, Clone)]
pub(super) struct Form {
    /// The address; it is in each message where it differs from one to the other.
    pub to: Template,
    pub subject: Template,
    /// Also as the group, by which brokers share messages out.
    pub key_as_group: bool,
    /// Also as what Azure Service Bus chooses a partition by.
    pub key_as_partition: bool,
    /// Messages are events.
    pub events: Option<Events>,
}

impl Form {
    /// What a link is attached to; none: each message says where it goes.
    pub fn node(&self) -> Option<&str> {
        self.to.fixed()
    }

    /// A part of an address as the broker reads it. RabbitMQ's addresses begin with a slash, and are percent-encoded between slashes.
    /// <https://www.rabbitmq.com/docs/amqp#address-v2>
    fn escaped(&self, value: &str) -> String {
        const SET: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
        let is_encoded = self.to.texts().next().is_some_and(|start| start.starts_with('/'));
        if is_encoded { utf8_percent_encode(value, SET).to_string() } else { value.to_owned() }
    }
}

/// Whether an address of RabbitMQ, if it is one, has a routing key that consumers of both protocols can read.
pub(super) fn check_routing_key(address: &str) -> Result<(), String> {
    let key = address.strip_prefix("/exchanges/").and_then(|rest| rest.split_once('/')).map_or("", |(_, key)| key);
    match percent_decode_str(key).count() {
        0..=ROUTING_KEY_BYTES_MAX => Ok(()),
        bytes => Err(format!(
            "its routing key has {bytes} bytes, and RabbitMQ's consumers read {ROUTING_KEY_BYTES_MAX} at most"
        )),
    }
}

/// All sections of a message, and its address where it has one of its own; or why there can be none.
pub(super) fn sections(form: &Form, message: &Message) -> Result<(BytesMut, Option<String>), String> {
    // One that lacks a field of it has none.
    let subject = form.subject.of(message).ok();
    let to = match form.to.has_fields() {
        true => Some(
            form.to
                .encoded(message, |value| Some(form.escaped(value)))
                .map_err(|problem| format!("the address {problem}"))?,
        ),
        false => None,
    };
    to.as_deref().map_or(Ok(()), check_routing_key)?;
    if !message.content_type.is_ascii() {
        return Err("its content type has characters that are not ASCII, which AMQP 1.0 does not carry".to_owned());
    }
    let (mut content_type, mut payload) = (message.content_type.as_str(), message.payload.clone());
    let mut attributes: Vec<(String, String)> = Vec::new();
    match &form.events {
        None => {}
        Some(events) if events.mode == CloudEvents::Structured => {
            (content_type, payload) = (STRUCTURED, events.structured(message));
        }
        Some(events) => attributes
            .extend(events.attributes(message).into_iter().map(|(name, value)| (format!("{ATTRIBUTE}{name}"), value))),
    }
    let mut into = BytesMut::with_capacity(payload.len() + 512);
    // It survives its broker.
    put_composite(&mut into, HEADER, &[Field::Bool(true)]);
    let key = message.ordering_key();
    if let Some(key) = key.filter(|_| form.key_as_partition) {
        put_descriptor(&mut into, MESSAGE_ANNOTATIONS);
        put(&mut into, Field::Map(&[(Field::Symbol(PARTITION_KEY), Field::Text(key))]));
    }
    let id = message.id.to_string();
    let occurred = message.occurred_at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    let occurred = occurred.and_then(|since| i64::try_from(since.as_millis()).ok());
    let properties = [
        Field::Text(&id),
        Field::Null,
        to.as_deref().map_or(Field::Null, Field::Text),
        subject.as_deref().map_or(Field::Null, Field::Text),
        Field::Null,
        Field::Null,
        Field::Symbol(content_type),
        Field::Null,
        Field::Null,
        occurred.map_or(Field::Null, Field::Timestamp),
        key.filter(|_| form.key_as_group).map_or(Field::Null, Field::Text),
    ];
    put_composite(&mut into, PROPERTIES, &properties);
    let headers = if form.events.is_some() { OF_EVENTS.headers(message) } else { ENVELOPE.headers(message) };
    let mut pairs = vec![(Field::Text(TYPE), Field::Text(&message.kind))];
    pairs.extend(form.events.iter().map(|_| (Field::Text(EVENT), Field::Text(VERSION))));
    pairs.extend(attributes.iter().map(|(name, value)| (Field::Text(name), Field::Text(value))));
    pairs.extend(headers.iter().map(|(name, value)| {
        let value = match value {
            HeaderValue::Text(text) => Field::Text(text),
            HeaderValue::Number(number) => Field::Long(*number),
        };
        (Field::Text(name), value)
    }));
    put_descriptor(&mut into, APPLICATION_PROPERTIES);
    put(&mut into, Field::Map(&pairs));
    put_descriptor(&mut into, DATA);
    put(&mut into, Field::Binary(&payload));
    Ok((into, to))
}

/// A message as far as it can be read.
#[derive(Debug)]
pub(super) struct Came {
    /// None where there is none, or none of ours.
    pub id: Option<MessageId>,
    pub message: Message,
    /// The broker says that it may have handed it out before.
    pub redelivered: bool,
    /// It is one of a stream.
    pub is_of_stream: bool,
}

#[derive(Default)]
struct Found {
    id: Option<MessageId>,
    subject: Option<String>,
    content_type: Option<String>,
    occurred_at: Option<SystemTime>,
    kind: Option<String>,
    redelivered: bool,
    is_of_stream: bool,
    /// As RabbitMQ notes them.
    routing_key: Option<String>,
    basic_type: Option<String>,
    properties: Vec<(String, Scalar)>,
    payload: BytesMut,
}

enum Scalar {
    Text(String),
    Number(i64),
}

/// What came from `origin`.
pub(super) fn received(sections: &Bytes, origin: &str) -> Came {
    let mut found = Found::default();
    let unreadable = found.read(sections).err();
    if unreadable.is_some() {
        // Nobody can tell which part of it is the payload.
        found.payload = BytesMut::from(&sections[..]);
    }
    let wire = |value: &Scalar| match value {
        Scalar::Text(text) => HeaderValue::Text(Cow::Owned(text.clone())),
        Scalar::Number(number) => HeaderValue::Number(*number),
    };
    let is_event = found.properties.iter().any(|(name, _)| name == EVENT);
    let envelope = if is_event { OF_EVENTS } else { ENVELOPE };
    let is_own = |name: &str| !is_event || (name != EVENT && !name.starts_with(ATTRIBUTE));
    let own = found.properties.iter().filter(|(name, _)| is_own(name));
    let opened = envelope.open(own.map(|(name, value)| (name.as_str(), wire(value))));
    let mut headers = opened.headers;
    // Nobody but this side says that.
    headers.remove(UNREADABLE_HEADER);
    headers.extend(unreadable.map(|problem| (UNREADABLE_HEADER.to_owned(), problem)));
    let message = Message {
        id: found.id.unwrap_or_else(MessageId::new),
        topic: opened.topic.unwrap_or_else(|| origin.to_owned()),
        kind: found.basic_type.or(found.kind).or_else(|| found.subject.clone()).unwrap_or_default(),
        key: opened.key,
        routing_key: found.subject.or(found.routing_key),
        content_type: found.content_type.unwrap_or_else(|| "application/octet-stream".to_owned()),
        tenant_id: opened.tenant_id,
        aggregate_type: opened.aggregate_type,
        aggregate_id: opened.aggregate_id,
        aggregate_version: opened.aggregate_version,
        occurred_at: found.occurred_at,
        delay: Duration::ZERO,
        headers,
        payload: found.payload.freeze(),
    };
    Came { id: found.id, message, redelivered: found.redelivered, is_of_stream: found.is_of_stream }
}

impl Found {
    fn read(&mut self, sections: &[u8]) -> Result<(), String> {
        let mut reader = Reader(sections);
        while !reader.is_empty() {
            let Value::Described(Descriptor::Number(section), bytes) = reader.value()? else {
                return Err("it has a section that is none".to_owned());
            };
            let value = Reader(bytes).value()?;
            match (section, value) {
                (HEADER, Value::List(mut list)) => {
                    list.pass(3)?;
                    let first = list.next()?.bool();
                    let count = list.next()?.unsigned();
                    self.redelivered = first == Some(false) || count.is_some_and(|count| count > 0);
                }
                (MESSAGE_ANNOTATIONS, Value::Map(map)) => self.annotations(map)?,
                (PROPERTIES, Value::List(list)) => self.properties(list)?,
                (APPLICATION_PROPERTIES, Value::Map(map)) => self.application_properties(map)?,
                (DATA, Value::Binary(bytes)) => self.payload.put_slice(bytes),
                (VALUE, Value::Binary(bytes) | Value::Text(bytes) | Value::Symbol(bytes)) => {
                    self.payload.put_slice(bytes)
                }
                (VALUE, Value::Null) => {}
                (VALUE | SEQUENCE, _) => return Err("its body is neither bytes nor text".to_owned()),
                // What brokers note, and what comes behind the body.
                _ => {}
            }
        }
        Ok(())
    }

    fn annotations(&mut self, mut map: List<'_>) -> Result<(), String> {
        while let Some((name, value)) = map.pair()? {
            match name.text().as_deref() {
                Some(STREAM_OFFSET) => self.is_of_stream = true,
                Some(ROUTING_KEY) => self.routing_key = text(value)?,
                Some(BASIC_TYPE) => self.basic_type = text(value)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn properties(&mut self, mut list: List<'_>) -> Result<(), String> {
        self.id = match list.next()? {
            Value::Uuid(bytes) => uuid_text(bytes).parse().ok(),
            other => other.text().and_then(|text| text.parse().ok()),
        };
        list.pass(2)?;
        self.subject = text(list.next()?)?;
        list.pass(2)?;
        self.content_type = text(list.next()?)?;
        list.pass(2)?;
        if let Value::Timestamp(ms) = list.next()? {
            let since = u64::try_from(ms).ok().map(Duration::from_millis);
            self.occurred_at = since.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
        }
        Ok(())
    }

    fn application_properties(&mut self, mut map: List<'_>) -> Result<(), String> {
        while let Some((name, value)) = map.pair()? {
            let Some(name) = text(name)? else { continue };
            let value = match value {
                Value::Signed(number) if name == Envelope::AGGREGATE_VERSION => Scalar::Number(number),
                Value::Signed(number) | Value::Timestamp(number) => Scalar::Text(number.to_string()),
                Value::Unsigned(number) => Scalar::Text(number.to_string()),
                Value::Bool(value) => Scalar::Text(value.to_string()),
                Value::Uuid(bytes) => Scalar::Text(uuid_text(bytes)),
                // RabbitMQ makes bytes of a text over 4096 bytes, or with a NUL, that was sent over AMQP 0-9-1.
                Value::Binary(bytes) => match text(Value::Text(bytes)) {
                    Ok(text) => Scalar::Text(text.unwrap_or_default()),
                    Err(problem) if name == TYPE || ENVELOPE.is_column(&name) => return Err(problem),
                    Err(_) => continue,
                },
                other => match text(other)? {
                    Some(text) => Scalar::Text(text),
                    // Floats, and what an application property may not be.
                    None => continue,
                },
            };
            match (name.as_str(), value) {
                (TYPE, Scalar::Text(text)) => self.kind = Some(text),
                (_, value) => self.properties.push((name, value)),
            }
        }
        Ok(())
    }
}

fn text(value: Value<'_>) -> Result<Option<String>, String> {
    let (Value::Text(bytes) | Value::Symbol(bytes)) = value else { return Ok(None) };
    let text = std::str::from_utf8(bytes).map_err(|_| "a text in it is not UTF-8")?;
    Ok(Some(text.to_owned()))
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form() -> Form {
        let of = |text| Template::parse(text).unwrap();
        let (to, subject) = (of("/exchanges/x/{key}"), of("{routing_key}"));
        Form { to, subject, key_as_group: true, key_as_partition: true, events: None }
    }

    fn message() -> Message {
        Message::new("orders", "order.placed", "x\0")
            .key("k")
            .tenant("t")
            .aggregate("order", "o-1", 7)
            .content_type("text/plain")
            .header("postroom-type", "forged")
            .header("n ä", "v:\n")
    }

    #[test]
    fn what_was_sent_is_what_is_received() {
        let sent = message();
        let came = received(&sections(&form(), &sent).unwrap().0.freeze(), "q");
        assert_eq!((came.id, came.redelivered), (Some(sent.id), false));
        let expected = Message { routing_key: Some("order.placed".to_owned()), ..sent };
        assert_eq!(format!("{:?}", came.message), format!("{expected:?}"));
    }

    #[test]
    fn what_others_send_is_read_as_far_as_it_can_be() {
        let mut bytes = BytesMut::new();
        put_composite(&mut bytes, HEADER, &[Field::Null, Field::Null, Field::Null, Field::Bool(false), Field::Uint(0)]);
        let id = message().id;
        put_descriptor(&mut bytes, PROPERTIES);
        bytes.put_slice(&[0xc0, 21, 1, 0x98]);
        bytes.put_slice(id.as_uuid().as_bytes());
        bytes.put_slice(&[0x40; 3]);
        put_descriptor(&mut bytes, APPLICATION_PROPERTIES);
        let pairs = [
            (Field::Text("n"), Field::Uint(7)),
            (Field::Text("b"), Field::Bool(true)),
            (Field::Text("z"), Field::Null),
        ];
        put(&mut bytes, Field::Map(&pairs));
        put_descriptor(&mut bytes, VALUE);
        put(&mut bytes, Field::Text("body"));
        let came = received(&bytes.freeze(), "q");
        assert_eq!((came.id, came.redelivered, &came.message.payload[..]), (Some(id), true, &b"body"[..]));
        let headers: Vec<_> = came.message.headers.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!((headers, came.message.topic.as_str()), (vec!["b=true".to_owned(), "n=7".to_owned()], "q"));
    }

    #[test]
    fn what_cannot_be_read_is_kept_whole_and_says_so() {
        let mut latin = BytesMut::new();
        put_descriptor(&mut latin, APPLICATION_PROPERTIES);
        latin.put_slice(&[0xc1, 7, 2, 0xa1, 1, b'n', 0xa1, 1, 0xe4]);
        let mut sequence = BytesMut::new();
        put_composite(&mut sequence, SEQUENCE, &[Field::Bool(true)]);
        for (bytes, why) in [
            (latin.freeze(), "UTF-8"),
            (sequence.freeze(), "neither bytes nor text"),
            (Bytes::from(vec![0; 10_000]), "described"),
            (Bytes::from_static(b"\x00\x53\x75\xa0\xff"), "cut off"),
        ] {
            let came = received(&bytes, "q");
            let told = came.message.headers.get(UNREADABLE_HEADER).unwrap();
            assert!(told.contains(why), "{told}");
            assert!(came.id.is_none());
        }
    }

    #[test]
    fn what_amqp_does_not_carry_is_told() {
        assert!(sections(&form(), &message().content_type("text/ä")).unwrap_err().contains("ASCII"));
        let long = message().key("x".repeat(256));
        assert!(sections(&form(), &long).unwrap_err().contains("256 bytes, and RabbitMQ's consumers read 255"));
        assert!(sections(&form(), &message().key("ä".repeat(127))).is_ok(), "it is counted as it is read");
        // A subject is no address.
        let form = Form { subject: Template::parse("{tenant_id}").unwrap(), ..form() };
        assert!(sections(&form, &Message { tenant_id: None, ..message() }).is_ok());
        let keyless = Message { key: None, aggregate_id: None, ..message() };
        assert!(sections(&self::form(), &keyless).unwrap_err().contains("address needs the field key"));
        assert_eq!(self::form().escaped("a/b ä"), "a%2Fb%20%C3%A4");
    }
}
