//! Pure: a message as the headers and the body of a request.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::SystemTime;

use bytes::Bytes;
use percent_encoding::{AsciiSet, CONTROLS, NON_ALPHANUMERIC, utf8_percent_encode};
use postroom::Message;
use postroom::envelope::{Envelope, HeaderValue};
use serde_json::Value;

use crate::cloud_events::{CloudEvents, Events, STRUCTURED};

/// The message id, which stays the same when a request is repeated.
pub(super) const ID: &str = "webhook-id";
/// When the request was made, in seconds since 1970.
pub(super) const TIMESTAMP: &str = "webhook-timestamp";
pub(super) const SIGNATURE: &str = "webhook-signature";
const CONTENT_TYPE: &str = "content-type";
const TYPE: &str = "postroom-type";
const OCCURRED_MS: &str = "postroom-occurred-ms";
/// An object of the headers that cannot travel as such.
const OTHERS: &str = "postroom-headers";
const ENVELOPE: Envelope = Envelope::reserving(&[CONTENT_TYPE, TYPE, OCCURRED_MS, OTHERS]);

/// A message's own header of such a name would mean something to servers and proxies on the way, or pass for one of the route's.
const TAKEN: [&str; 28] = [
    "accept-encoding",
    "authorization",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "forwarded",
    "host",
    "keep-alive",
    "max-forwards",
    "origin",
    "postroom-headers",
    "range",
    "referer",
    "set-cookie",
    "te",
    "true-client-ip",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "via",
    "x-http-method-override",
    "x-original-url",
    "x-real-ip",
    "x-rewrite-url",
];
const TAKEN_PREFIXES: [&str; 7] = ["webhook-", "ce-", "proxy-", "sec-", "if-", "x-forwarded-", "access-control-"];

/// What is sent.
#[derive(Debug)]
pub(super) struct Request {
    pub headers: Vec<(Cow<'static, str>, String)>,
    pub body: Bytes,
}

/// The request for a message.
pub(super) fn of(message: &Message, events: Option<&Events>) -> Request {
    let Some(events) = events else { return plain(message) };
    match events.mode {
        CloudEvents::Structured => {
            Request { headers: vec![(CONTENT_TYPE.into(), STRUCTURED.to_owned())], body: events.structured(message) }
        }
        CloudEvents::Binary => {
            let mut request = plain(message);
            let attributes = events.attributes(message).into_iter();
            request.headers.extend(attributes.map(|(name, value)| (format!("ce-{name}").into(), encoded(&value))));
            request
        }
    }
}

fn plain(message: &Message) -> Request {
    let mut headers: Vec<(Cow<'static, str>, String)> = Vec::new();
    let mut others = BTreeMap::new();
    let mut put = |name: Cow<'_, str>, value: Cow<'_, str>, is_own: bool| {
        let lower = name.to_ascii_lowercase();
        // Names are compared without their case on the way, and some servers take `_` for `-`: an own header must not take the place of
        // one of ours, or of one that means something.
        let read = lower.replace('_', "-");
        let twice = headers.iter().any(|(found, _)| found.replace('_', "-") == read);
        let poses = is_own
            && name != read
            && ["postroom-", "tenant-", "aggregate-"].iter().any(|start| read.starts_with(start));
        if is_value(&value) && is_name(&name) && !twice && !poses && !(is_own && is_taken(&read)) {
            headers.push((lower.into(), value.into_owned()));
        } else {
            others.insert(name.into_owned(), value.into_owned());
        }
    };
    put(CONTENT_TYPE.into(), message.content_type.as_str().into(), false);
    put(TYPE.into(), message.kind.as_str().into(), false);
    let occurred = message.occurred_at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    if let Some(since) = occurred {
        put(OCCURRED_MS.into(), since.as_millis().to_string().into(), false);
    }
    for (name, value) in ENVELOPE.headers(message) {
        match value {
            HeaderValue::Text(text) => put(name, text, true),
            HeaderValue::Number(number) => put(name, number.to_string().into(), false),
        }
    }
    if !others.is_empty() {
        headers.push((OTHERS.into(), in_ascii(&serde_json::json!(others))));
    }
    Request { headers, body: message.payload.clone() }
}

/// A value of a header in the binary mode: what is not printable ASCII, and space, quote and percent, is percent-encoded.
fn encoded(value: &str) -> String {
    const SET: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');
    utf8_percent_encode(value, SET).to_string()
}

/// A field of a message as a part of a path or a query. None: it would name another place.
pub(super) fn part_of_url(value: &str) -> Option<String> {
    const SET: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    (!matches!(value, "." | "..")).then(|| utf8_percent_encode(value, SET).to_string())
}

fn is_taken(lower: &str) -> bool {
    TAKEN.contains(&lower) || TAKEN_PREFIXES.iter().any(|prefix| lower.starts_with(prefix))
}

/// A token of RFC 9110.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}

/// Printable ASCII, without a space at either end: what every server leaves as it is.
fn is_value(value: &str) -> bool {
    !value.is_empty() && value.trim() == value && value.bytes().all(|byte| (b' '..=b'~').contains(&byte))
}

fn in_ascii(value: &Value) -> String {
    let mut text = String::new();
    for c in value.to_string().chars() {
        if c.is_ascii() && c != '\u{7f}' {
            text.push(c);
        } else {
            let mut units = [0; 2];
            c.encode_utf16(&mut units).iter().for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header<'r>(request: &'r Request, name: &str) -> Vec<&'r str> {
        request.headers.iter().filter(|(found, _)| found == name).map(|(_, value)| value.as_str()).collect()
    }

    fn message() -> Message {
        Message::new("orders", "order.placed", r#"{"n":12345678901234567890123}"#)
            .key("k 1")
            .tenant("t")
            .aggregate("order", "o-1", 7)
            .header("traceparent", "00-1-2-01")
            .content_type("application/json")
    }

    #[test]
    fn a_header_that_means_something_on_the_way_goes_into_one_of_its_own() {
        let message = message()
            .header("Content-Length", "7")
            .header("authorization", "Bearer x")
            .header("webhook-id", "forged")
            .header("webhook_id", "forged")
            .header("content_length", "7")
            .header("Tenant_Id", "forged")
            .header("x y", "name")
            .header("greeting", "gr\u{fc}\u{df}e \u{1f600}")
            .header("a", "b\r\nhost: evil")
            .header("empty", "")
            .header("A", "twice");
        let request = of(&message, None);
        assert_eq!(
            (header(&request, "traceparent"), header(&request, "postroom-key")),
            (vec!["00-1-2-01"], vec!["k 1"])
        );
        assert_eq!(
            (header(&request, "postroom-type"), header(&request, "content-type")),
            (vec!["order.placed"], vec!["application/json"])
        );
        for name in [
            "content-length",
            "content_length",
            "authorization",
            "webhook-id",
            "webhook_id",
            "tenant_id",
            "x y",
            "host",
        ] {
            assert!(header(&request, name).is_empty(), "{name}");
        }
        let others = header(&request, OTHERS)[0];
        assert!(others.is_ascii() && !others.contains(['\r', '\n']), "{others}");
        let others: BTreeMap<String, String> = serde_json::from_str(others).unwrap();
        assert_eq!(others["greeting"], "gr\u{fc}\u{df}e \u{1f600}");
        assert_eq!(
            (others["webhook-id"].as_str(), others["a"].as_str(), others["empty"].as_str()),
            ("forged", "b\r\nhost: evil", "")
        );
        assert_eq!(request.body, message.payload);
    }

    #[test]
    fn attributes_of_an_event_are_encoded_in_headers() {
        let events = |mode| Events { mode, source: "https://shop.example/\u{fc}".to_owned() };
        let message = message();
        let request = of(&message, Some(&events(CloudEvents::Binary)));
        assert_eq!(
            (header(&request, "ce-id")[0], header(&request, "ce-specversion")[0]),
            (message.id.to_string().as_str(), "1.0")
        );
        assert_eq!(
            (header(&request, "ce-partitionkey")[0], header(&request, "ce-source")[0]),
            ("k%201", "https://shop.example/%C3%BC")
        );
        assert_eq!(request.body, message.payload);
        let request = of(&message, Some(&events(CloudEvents::Structured)));
        assert_eq!(request.headers, [(CONTENT_TYPE.into(), STRUCTURED.to_owned())]);
    }

    #[test]
    fn a_field_stays_within_its_part_of_the_url() {
        assert_eq!(part_of_url("a/b?c#d e%").as_deref(), Some("a%2Fb%3Fc%23d%20e%25"));
        assert_eq!((part_of_url(".."), part_of_url(".")), (None, None));
        assert_eq!(part_of_url("a..b").as_deref(), Some("a..b"));
    }
}
