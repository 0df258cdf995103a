//! Pure: packets of MQTT 5 as bytes, as far as a client needs them. <https://docs.oasis-open.org/mqtt/mqtt/v5.0/os/mqtt-v5.0-os.html>

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// The largest that a packet may be behind its first five bytes.
pub(super) const PACKET_BYTES_MAX: usize = 268_435_455;
/// The longest string of the protocol.
pub(super) const STRING_BYTES_MAX: usize = 65_535;

const SESSION_EXPIRY: u8 = 0x11;
const RECEIVE_MAXIMUM: u8 = 0x21;
const MAXIMUM_QOS: u8 = 0x24;
const RETAIN_AVAILABLE: u8 = 0x25;
const MAXIMUM_PACKET_SIZE: u8 = 0x27;
const SERVER_KEEP_ALIVE: u8 = 0x13;
const REASON_STRING: u8 = 0x1f;
const CONTENT_TYPE: u8 = 0x03;
const USER_PROPERTY: u8 = 0x26;

/// The first packet of a client.
pub(super) struct Connect<'a> {
    pub client_id: &'a str,
    /// Forget what a session of this id had.
    pub clean_start: bool,
    pub keep_alive_seconds: u16,
    /// How long the broker keeps the session without a connection.
    pub session_expiry_seconds: u32,
    /// Most messages that it sends and that are not acked.
    pub receive_maximum: u16,
    pub user: &'a str,
    pub password: &'a str,
}

/// The broker's answer to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Connack {
    pub session_present: bool,
    pub reason: Reason,
    /// Most messages that may be sent to it and are not acked.
    pub receive_maximum: u16,
    pub maximum_qos: u8,
    pub retain_available: bool,
    /// None: any.
    pub packet_bytes_max: Option<usize>,
    pub keep_alive_seconds: Option<u16>,
    /// None: as long as the client asked for.
    pub session_expiry_seconds: Option<u32>,
}

/// A number with what it means, and what the broker added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reason {
    pub code: u8,
    pub text: Option<String>,
}

/// A message as it goes over the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Publish {
    pub topic: String,
    /// None: QoS 0.
    pub packet_id: Option<u16>,
    pub duplicate: bool,
    pub retain: bool,
    pub content_type: Option<String>,
    pub user_properties: Vec<(String, String)>,
    /// A text in it is not UTF-8.
    pub unreadable: bool,
    pub payload: Bytes,
}

/// A packet from the broker.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Packet {
    Connack(Connack),
    Publish(Publish),
    Puback(u16, Reason),
    Suback(u16, Vec<u8>),
    Pingresp,
    Disconnect(Reason),
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match self.code {
            0x00 => "success",
            0x04 => "disconnected with its will",
            0x10 => "nobody subscribes to the topic",
            0x80 => "unspecified error",
            0x81 => "malformed packet",
            0x82 => "protocol error",
            0x83 => "an error of its own",
            0x84 => "it does not speak MQTT 5",
            0x85 => "the client id is not valid",
            0x86 => "bad user name or password",
            0x87 => "not authorized",
            0x88 => "server unavailable",
            0x89 => "server busy",
            0x8a => "banned",
            0x8b => "server shutting down",
            0x8c => "bad authentication method",
            0x8d => "no packet within the keep-alive time",
            0x8e => "another client has connected with this client id",
            0x8f => "the topic filter is not valid",
            0x90 => "the topic is not valid",
            0x91 => "the packet id is in use",
            0x93 => "more messages than its receive maximum",
            0x95 => "the packet is too large",
            0x97 => "quota exceeded",
            0x99 => "the payload has not the format that it says",
            0x9a => "it keeps no retained messages",
            0x9b => "it does not have this QoS",
            0x9c | 0x9d => "another server is to be used",
            _ => "a reason that MQTT 5 does not name",
        };
        write!(f, "{what} (0x{:02x})", self.code)?;
        match &self.text {
            Some(text) => write!(f, ": {text}"),
            None => Ok(()),
        }
    }
}

/// Writes a packet: its kind, and what is behind the length.
fn framed(into: &mut BytesMut, kind: u8, body: &[&[u8]]) {
    into.put_u8(kind);
    put_varint(into, body.iter().map(|part| part.len()).sum());
    body.iter().for_each(|part| into.put_slice(part));
}

fn put_varint(into: &mut BytesMut, mut value: usize) {
    loop {
        let low = (value % 128) as u8;
        value /= 128;
        into.put_u8(if value > 0 { low | 0x80 } else { low });
        if value == 0 {
            return;
        }
    }
}

/// Longer ones are cut; who writes has looked at them.
fn put_string(into: &mut BytesMut, text: &str) {
    let bytes = text.as_bytes();
    let length = bytes.len().min(STRING_BYTES_MAX);
    into.put_u16(length as u16);
    into.put_slice(&bytes[..length]);
}

fn put_properties(into: &mut BytesMut, properties: &[u8]) {
    put_varint(into, properties.len());
    into.put_slice(properties);
}

pub(super) fn connect(into: &mut BytesMut, connect: &Connect<'_>) {
    let mut body = BytesMut::new();
    put_string(&mut body, "MQTT");
    body.put_u8(5);
    let (has_user, has_password) = (!connect.user.is_empty(), !connect.password.is_empty());
    body.put_u8(u8::from(has_user) << 7 | u8::from(has_password) << 6 | u8::from(connect.clean_start) << 1);
    body.put_u16(connect.keep_alive_seconds);
    let mut properties = BytesMut::new();
    properties.put_u8(SESSION_EXPIRY);
    properties.put_u32(connect.session_expiry_seconds);
    properties.put_u8(RECEIVE_MAXIMUM);
    properties.put_u16(connect.receive_maximum.max(1));
    put_properties(&mut body, &properties);
    put_string(&mut body, connect.client_id);
    if has_user {
        put_string(&mut body, connect.user);
    }
    if has_password {
        put_string(&mut body, connect.password);
    }
    framed(into, 0x10, &[&body]);
}

/// What is in front of the payload of a message.
pub(super) fn publish_head(publish: &Publish) -> BytesMut {
    let mut head = BytesMut::new();
    put_string(&mut head, &publish.topic);
    publish.packet_id.iter().for_each(|id| head.put_u16(*id));
    let mut properties = BytesMut::new();
    if let Some(content_type) = &publish.content_type {
        properties.put_u8(CONTENT_TYPE);
        put_string(&mut properties, content_type);
    }
    for (name, value) in &publish.user_properties {
        properties.put_u8(USER_PROPERTY);
        put_string(&mut properties, name);
        put_string(&mut properties, value);
    }
    put_properties(&mut head, &properties);
    head
}

pub(super) fn publish(into: &mut BytesMut, publish: &Publish) {
    let head = publish_head(publish);
    let qos = u8::from(publish.packet_id.is_some());
    let kind = 0x30 | u8::from(publish.duplicate) << 3 | qos << 1 | u8::from(publish.retain);
    framed(into, kind, &[&head, &publish.payload]);
}

pub(super) fn puback(into: &mut BytesMut, packet_id: u16) {
    framed(into, 0x40, &[&packet_id.to_be_bytes()]);
}

/// At least once, and nothing that is only retained.
pub(super) fn subscribe<'a>(into: &mut BytesMut, packet_id: u16, filters: impl Iterator<Item = &'a str>) {
    let mut body = BytesMut::new();
    body.put_u16(packet_id);
    put_properties(&mut body, &[]);
    for filter in filters {
        put_string(&mut body, filter);
        body.put_u8(1 | 2 << 4);
    }
    framed(into, 0x82, &[&body]);
}

pub(super) fn pingreq(into: &mut BytesMut) {
    framed(into, 0xc0, &[]);
}

pub(super) fn disconnect(into: &mut BytesMut) {
    framed(into, 0xe0, &[]);
}

/// The next packet that is there as a whole; none: more has to be read. After an error nothing that follows can be read.
pub(super) fn next(from: &mut BytesMut) -> Result<Option<Packet>, String> {
    let (mut length, mut at) = (0_usize, 1);
    loop {
        let Some(byte) = from.get(at) else {
            return if at > 4 { Err("a length of more than four bytes".to_owned()) } else { Ok(None) };
        };
        if at > 4 {
            return Err("a length of more than four bytes".to_owned());
        }
        length |= usize::from(byte & 0x7f) << (7 * (at - 1));
        at += 1;
        if byte & 0x80 == 0 {
            break;
        }
    }
    if from.len() < at + length {
        from.reserve((at + length - from.len()).min(1 << 20));
        return Ok(None);
    }
    let kind = from[0];
    from.advance(at);
    let mut body = from.split_to(length).freeze();
    let packet = match kind >> 4 {
        2 => connack(&mut body),
        3 => published(kind, body),
        4 => id(&mut body).map(|id| Packet::Puback(id, reason(&mut body))),
        9 => id(&mut body).and_then(|id| properties(&mut body).map(|_| Packet::Suback(id, body.to_vec()))),
        13 => Some(Packet::Pingresp),
        14 => Some(Packet::Disconnect(reason(&mut body))),
        other => return Err(format!("a packet of kind {other}, which no client gets")),
    };
    packet.map(Some).ok_or_else(|| format!("a packet of kind {} that cannot be read", kind >> 4))
}

fn id(from: &mut Bytes) -> Option<u16> {
    from.try_get_u16().ok()
}

fn connack(from: &mut Bytes) -> Option<Packet> {
    let (flags, code) = (from.try_get_u8().ok()?, from.try_get_u8().ok()?);
    let mut connack = Connack {
        session_present: flags & 1 == 1,
        reason: Reason { code, text: None },
        receive_maximum: u16::MAX,
        maximum_qos: 2,
        retain_available: true,
        packet_bytes_max: None,
        keep_alive_seconds: None,
        session_expiry_seconds: None,
    };
    // A broker that does not speak MQTT 5 answers without properties.
    let properties = match properties(from) {
        None if code == 0 => return None,
        found => found.unwrap_or_default(),
    };
    for property in properties {
        match property {
            Property::Number(SESSION_EXPIRY, seconds) => connack.session_expiry_seconds = Some(seconds),
            Property::Number(RECEIVE_MAXIMUM, most) => connack.receive_maximum = most.clamp(1, 65_535) as u16,
            Property::Number(MAXIMUM_QOS, qos) => connack.maximum_qos = qos.min(2) as u8,
            Property::Number(RETAIN_AVAILABLE, is) => connack.retain_available = is != 0,
            Property::Number(MAXIMUM_PACKET_SIZE, bytes) => connack.packet_bytes_max = Some(bytes as usize),
            Property::Number(SERVER_KEEP_ALIVE, seconds) => connack.keep_alive_seconds = Some(seconds as u16),
            Property::Text(REASON_STRING, text, _) => connack.reason.text = Some(text),
            _ => {}
        }
    }
    Some(Packet::Connack(connack))
}

fn published(kind: u8, mut from: Bytes) -> Option<Packet> {
    let (topic, mut whole) = string(&mut from)?;
    let packet_id = match kind >> 1 & 3 {
        0 => None,
        1 => Some(id(&mut from)?),
        _ => return None,
    };
    let (mut content_type, mut user_properties) = (None, Vec::new());
    for property in properties(&mut from)? {
        match property {
            Property::Text(CONTENT_TYPE, text, is_whole) => {
                content_type = Some(text);
                whole &= is_whole;
            }
            Property::Pair(name, value, is_whole) => {
                user_properties.push((name, value));
                whole &= is_whole;
            }
            _ => {}
        }
    }
    let (duplicate, retain) = (kind & 8 != 0, kind & 1 != 0);
    let unreadable = !whole;
    Some(Packet::Publish(Publish {
        topic,
        packet_id,
        duplicate,
        retain,
        content_type,
        user_properties,
        unreadable,
        payload: from,
    }))
}

/// What ends a packet that says how something went; nothing: well.
fn reason(from: &mut Bytes) -> Reason {
    let code = from.try_get_u8().unwrap_or_default();
    let text = properties(from).unwrap_or_default().into_iter().find_map(|property| match property {
        Property::Text(REASON_STRING, text, _) => Some(text),
        _ => None,
    });
    Reason { code, text }
}

enum Property {
    Number(u8, u32),
    /// The last: whether it is UTF-8.
    Text(u8, String, bool),
    Pair(String, String, bool),
}

fn properties(from: &mut Bytes) -> Option<Vec<Property>> {
    let length = varint(from)?;
    if length > from.len() {
        return None;
    }
    let mut from = from.split_to(length);
    let mut found = Vec::new();
    while !from.is_empty() {
        let name = from.try_get_u8().ok()?;
        found.push(match name {
            0x01 | 0x17 | 0x19 | 0x24 | 0x25 | 0x28 | 0x29 | 0x2a => {
                Property::Number(name, from.try_get_u8().ok()?.into())
            }
            0x13 | 0x21 | 0x22 | 0x23 => Property::Number(name, from.try_get_u16().ok()?.into()),
            0x02 | 0x11 | 0x18 | 0x27 => Property::Number(name, from.try_get_u32().ok()?),
            0x0b => Property::Number(name, u32::try_from(varint(&mut from)?).ok()?),
            // The two that are bytes are read as text too: nobody looks at them.
            0x03 | 0x08 | 0x09 | 0x12 | 0x15 | 0x16 | 0x1a | 0x1c | 0x1f => {
                let (text, is_whole) = string(&mut from)?;
                Property::Text(name, text, is_whole)
            }
            USER_PROPERTY => {
                let ((name, one), (value, two)) = (string(&mut from)?, string(&mut from)?);
                Property::Pair(name, value, one && two)
            }
            _ => return None,
        });
    }
    Some(found)
}

fn varint(from: &mut Bytes) -> Option<usize> {
    let mut value = 0;
    for place in 0..4 {
        let byte = from.try_get_u8().ok()?;
        value |= usize::from(byte & 0x7f) << (7 * place);
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn string(from: &mut Bytes) -> Option<(String, bool)> {
    let length = usize::from(from.try_get_u16().ok()?);
    if length > from.len() {
        return None;
    }
    let bytes = from.split_to(length);
    let text = String::from_utf8_lossy(&bytes);
    let is_whole = matches!(text, std::borrow::Cow::Borrowed(_));
    Some((text.into_owned(), is_whole))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(payload: &'static [u8]) -> Publish {
        Publish {
            topic: "shop/orders".to_owned(),
            packet_id: Some(7),
            duplicate: true,
            retain: false,
            content_type: Some("text/plain".to_owned()),
            user_properties: vec![("n ä".to_owned(), "v".to_owned()), ("n ä".to_owned(), "w".to_owned())],
            unreadable: false,
            payload: Bytes::from_static(payload),
        }
    }

    #[test]
    fn a_message_is_read_as_it_was_written_whatever_pieces_it_comes_in() {
        let sent = message(b"\0\xffx");
        let mut written = BytesMut::new();
        publish(&mut written, &sent);
        publish(&mut written, &Publish { packet_id: None, ..message(b"") });
        let mut read = BytesMut::new();
        let mut found = Vec::new();
        for byte in written {
            read.put_u8(byte);
            while let Some(packet) = next(&mut read).unwrap() {
                found.push(packet);
            }
        }
        assert_eq!(found, [Packet::Publish(sent), Packet::Publish(Publish { packet_id: None, ..message(b"") })]);
    }

    /// As a broker writes them, by the tables of the specification.
    #[test]
    fn answers_are_read() {
        let mut read = BytesMut::from(
            &[
                0x20, 0x0d, 0x01, 0x00, 0x0a, 0x21, 0x00, 0x14, 0x27, 0x00, 0x00, 0x10, 0x00, 0x24, 0x01, 0x40, 0x02,
                0x00, 0x07, 0x40, 0x03, 0x00, 0x08, 0x10, 0x90, 0x04, 0x00, 0x01, 0x00, 0x87, 0xd0, 0x00, 0xe0, 0x02,
                0x8e, 0x00,
            ][..],
        );
        let mut all = Vec::new();
        while let Some(packet) = next(&mut read).unwrap() {
            all.push(packet);
        }
        let reason = |code| Reason { code, text: None };
        let Packet::Connack(connack) = &all[0] else { panic!("{all:?}") };
        assert!(connack.session_present && connack.reason == reason(0));
        assert_eq!((connack.receive_maximum, connack.packet_bytes_max, connack.maximum_qos), (20, Some(4096), 1));
        let rest = [
            Packet::Puback(7, reason(0)),
            Packet::Puback(8, reason(0x10)),
            Packet::Suback(1, vec![0x87]),
            Packet::Pingresp,
            Packet::Disconnect(reason(0x8e)),
        ];
        assert_eq!(all[1..], rest);
    }

    #[test]
    fn text_that_is_not_utf_8_is_marked_and_the_rest_is_read() {
        let mut written = BytesMut::new();
        publish(&mut written, &message(b"x"));
        let at = written.windows(4).position(|window| window == "n ä".as_bytes()).unwrap();
        written[at] = 0xff;
        let Some(Packet::Publish(read)) = next(&mut written).unwrap() else { panic!() };
        assert!(read.unreadable && read.payload == "x" && read.user_properties[1].1 == "w");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut read = BytesMut::from(&bytes[..]);
            while let Ok(Some(_)) = next(&mut read) {}
        }

        #[test]
        fn a_packet_that_was_changed_is_read_or_refused(at in 0_usize..60, to in any::<u8>()) {
            let mut written = BytesMut::new();
            publish(&mut written, &message(b"payload"));
            let at = at % written.len();
            written[at] = to;
            while let Ok(Some(_)) = next(&mut written) {}
        }
    }
}
