//! Pure: a message as headers of NATS, and back.
//!
//! A header of NATS is one line of text, and clients trim its value. What cannot travel like that (a line break, a space at the end, a name
//! with a colon) goes into one header of JSON, so that every message arrives as it was written.

use std::borrow::Cow;
use std::collections::BTreeMap;

use postroom::envelope::Envelope;
use postroom::{Message, MessageId};

use super::protocol::{Inbound, is_carried};
use crate::text_headers::{OCCURRED_MS, TYPE, TextHeaders};

/// The id by which JetStream recognises what it has stored already.
pub(super) const ID: &str = "Nats-Msg-Id";
/// The stream that must store the message, or nobody.
const EXPECTED_STREAM: &str = "Nats-Expected-Stream";
const CONTENT_TYPE: &str = "Content-Type";
/// An object of the headers that cannot travel as lines.
const OTHERS: &str = "postroom-headers";

/// Headers that begin with `Nats-` are orders to the server: to purge the stream, to expire the message, to put it elsewhere.
/// <https://docs.nats.io/nats-concepts/jetstream/headers>
const HEADERS: TextHeaders = TextHeaders {
    id: ID,
    content_type: CONTENT_TYPE,
    envelope: Envelope::reserving(&[CONTENT_TYPE, TYPE, OCCURRED_MS, OTHERS]).and_prefix("nats-"),
};

/// All headers of a message for the stream that must store it.
pub(super) fn of<'m>(message: &'m Message, stream: &'m str) -> Vec<(Cow<'m, str>, Cow<'m, str>)> {
    let mut all: Vec<(Cow<'m, str>, Cow<'m, str>)> = vec![(EXPECTED_STREAM.into(), stream.into())];
    let mut others = BTreeMap::new();
    for (name, value) in HEADERS.of(message) {
        if is_carried(&name, &value) {
            all.push((name, value));
        } else {
            others.insert(name, value);
        }
    }
    if !others.is_empty() {
        all.push((OTHERS.into(), serde_json::json!(others).to_string().into()));
    }
    all
}

/// A received message as far as it can be read. The id is none where there is none, or none of ours.
pub(super) fn received(inbound: Inbound) -> (Option<MessageId>, Message) {
    let mut found = inbound.headers();
    if let Some(at) = found.iter().position(|(name, _)| name == OTHERS)
        && let Ok(others) = serde_json::from_str::<BTreeMap<String, String>>(&found[at].1)
    {
        found.remove(at);
        // What means something to the server is never in there.
        found.extend(others.into_iter().filter(|(name, _)| !is_the_servers(name)));
    }
    found.retain(|(name, _)| name == ID || !is_the_servers(name));
    let (id, mut message) = HEADERS.message(&found, inbound.payload);
    message.routing_key = Some(inbound.subject);
    (id, message)
}

fn is_the_servers(name: &str) -> bool {
    name.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("nats-"))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use bytes::BytesMut;

    use super::super::protocol::{Said, next, publish};
    use super::*;

    /// What a subscription makes of what the sink sends.
    fn round_trip(message: &Message) -> Message {
        let headers = of(message, "ORDERS");
        let mut written = BytesMut::new();
        let lines = headers.iter().map(|(name, value)| (name.as_ref(), value.as_ref()));
        publish(&mut written, message.address(), Some("1"), lines, &message.payload);
        let mut came = BytesMut::from("HMSG");
        came.extend_from_slice(&written[4..]);
        let Some(Said::Message(inbound)) = next(&mut came).unwrap() else { panic!("no message") };
        received(inbound).1
    }

    #[test]
    fn a_message_comes_back_as_it_went() {
        let mut plain = Message::new("orders", "order.placed", "x").header("n", "v");
        let odd = [
            "a: b",
            "ä",
            " ",
            "",
            "line\nbreak",
            "end ",
            "\tx",
            "Content-Type",
            "Nats-Rollup",
            "nats-ttl",
            "postroom-headers",
        ];
        for name in odd.into_iter().filter(|name| !name.is_empty()) {
            for value in odd {
                plain = plain.header(name, value);
                let came = round_trip(&plain);
                assert_eq!(came.headers, plain.headers);
            }
        }
        let mut full =
            plain.clone().key("k\n").tenant(" t").aggregate("a", "a-1", 7).content_type("x/y\r\nNats-Rollup: all");
        full.occurred_at = Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_123));
        for mut sent in [plain, full] {
            sent.routing_key = Some("r.1".to_owned());
            let came = round_trip(&sent);
            assert_eq!(came.headers, sent.headers);
            let columns = |m: &Message| {
                let aggregate = (m.aggregate_type.clone(), m.aggregate_id.clone(), m.aggregate_version);
                let kind = (m.kind.clone(), m.content_type.clone(), m.occurred_at, m.id);
                (m.topic.clone(), m.key.clone(), m.tenant_id.clone(), aggregate, kind, m.routing_key.clone())
            };
            assert_eq!(columns(&came), columns(&sent));
        }
    }

    #[test]
    fn no_header_of_an_application_is_an_order_to_the_server() {
        let message = Message::new("orders", "order.placed", "x").header("Nats-Rollup", "all").header("NATS-TTL", "1s");
        for (name, _) in of(&message, "ORDERS") {
            assert!(
                [ID, EXPECTED_STREAM].contains(&name.as_ref()) || !name.to_lowercase().starts_with("nats-"),
                "{name}"
            );
        }
    }
}
