//! Pure: a message's columns as headers beside its own, with every broker the same.

use std::borrow::Cow;

use crate::message::{Headers, Message, UNREADABLE_HEADER};

const TOPIC: &str = "postroom-topic";
const KEY: &str = "postroom-key";
const TENANT: &str = "tenant-id";
const AGGREGATE_TYPE: &str = "aggregate-type";
const AGGREGATE_ID: &str = "aggregate-id";
const AGGREGATE_VERSION: &str = "aggregate-version";
const COLUMNS: [&str; 6] = [TOPIC, KEY, TENANT, AGGREGATE_TYPE, AGGREGATE_ID, AGGREGATE_VERSION];

/// Stands before the name of a message's own header that is named like one of ours: it must not pass for ours, and it comes
/// out under its own name again at our subscriptions.
const OWN: &str = "postroom-header-";

/// Beside the attributes of an event of CloudEvents that a sink has made of a message: what they say, the other headers say too. No header
/// of a message's own travels under this name.
pub const EVENT: &str = "postroom-event";

/// A header's value on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HeaderValue<'a> {
    /// Text.
    Text(Cow<'a, str>),
    /// A signed number, where the broker has numbers; its digits where it has none.
    Number(i64),
}

/// How one broker's headers are written and read.
#[derive(Debug, Clone, Copy)]
pub struct Envelope {
    /// Names that mean something to the broker itself.
    reserved: &'static [&'static str],
    /// In lower case: all names that begin so, in any case, mean something to the broker itself.
    prefix: Option<&'static str>,
}

/// What the headers of a received message say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Opened {
    /// The topic.
    pub topic: Option<String>,
    /// The key for order.
    pub key: Option<String>,
    /// The tenant.
    pub tenant_id: Option<String>,
    /// The aggregate's type.
    pub aggregate_type: Option<String>,
    /// The aggregate's id.
    pub aggregate_id: Option<String>,
    /// The aggregate's version.
    pub aggregate_version: Option<i64>,
    /// The message's own headers.
    pub headers: Headers,
}

impl Envelope {
    /// The one column that is a number, for brokers whose headers are all text.
    pub const AGGREGATE_VERSION: &'static str = AGGREGATE_VERSION;

    /// For a broker that takes these names for itself.
    pub const fn reserving(reserved: &'static [&'static str]) -> Self {
        Self { reserved, prefix: None }
    }

    /// The same for all names that begin with `prefix`, in whatever case; `prefix` itself is in lower case.
    pub const fn and_prefix(self, prefix: &'static str) -> Self {
        Self { prefix: Some(prefix), ..self }
    }

    /// The headers of a message: its own, and its columns.
    pub fn headers<'m>(&self, message: &'m Message) -> Vec<(Cow<'m, str>, HeaderValue<'m>)> {
        let text = |value: &'m str| HeaderValue::Text(Cow::Borrowed(value));
        let mut headers: Vec<(Cow<'m, str>, HeaderValue<'m>)> = message
            .headers
            .iter()
            .map(|(name, value)| {
                let taken = self.is_taken(name);
                let name = if taken { Cow::Owned(Self::escaped(name)) } else { Cow::Borrowed(name.as_str()) };
                (name, text(value))
            })
            .collect();
        let columns = [
            (TOPIC, Some(message.topic.as_str())),
            (KEY, message.ordering_key()),
            (TENANT, message.tenant_id.as_deref()),
            (AGGREGATE_TYPE, message.aggregate_type.as_deref()),
            (AGGREGATE_ID, message.aggregate_id.as_deref()),
        ];
        headers.extend(columns.into_iter().filter_map(|(name, value)| Some((Cow::Borrowed(name), text(value?)))));
        let version = message.aggregate_version.map(HeaderValue::Number);
        headers.extend(version.map(|version| (Cow::Borrowed(AGGREGATE_VERSION), version)));
        headers
    }

    /// Reads what came. A column of another kind than ours is not from us: it stays a header.
    pub fn open<'m>(&self, headers: impl IntoIterator<Item = (&'m str, HeaderValue<'m>)>) -> Opened {
        let mut opened = Opened::default();
        for (name, value) in headers {
            let column = match name {
                TOPIC => Some(&mut opened.topic),
                KEY => Some(&mut opened.key),
                TENANT => Some(&mut opened.tenant_id),
                AGGREGATE_TYPE => Some(&mut opened.aggregate_type),
                AGGREGATE_ID => Some(&mut opened.aggregate_id),
                _ => None,
            };
            match (column, value) {
                (Some(column), HeaderValue::Text(text)) => *column = Some(text.into_owned()),
                (None, HeaderValue::Number(number)) if name == AGGREGATE_VERSION => {
                    opened.aggregate_version = Some(number);
                }
                (None, HeaderValue::Text(text)) => {
                    opened.headers.insert(self.own_name(name).to_owned(), text.into_owned());
                }
                // Numbers under other names are the broker's own notes.
                (_, HeaderValue::Number(_)) => {}
            }
        }
        opened
    }

    /// Whether a header of this name is one of a message's columns.
    pub fn is_column(&self, name: &str) -> bool {
        COLUMNS.contains(&name)
    }

    /// The name under which a message's own header travels that has a name which is taken.
    pub fn escaped(name: &str) -> String {
        format!("{OWN}{name}")
    }

    /// Whether a header of this name is named like one of ours or the broker's, or like one that was renamed for that.
    fn is_taken(&self, mut name: &str) -> bool {
        while let Some(rest) = name.strip_prefix(OWN) {
            name = rest;
        }
        let begins = |prefix: &str| name.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
        COLUMNS.contains(&name)
            || name == UNREADABLE_HEADER
            || name == EVENT
            || self.reserved.contains(&name)
            || self.prefix.is_some_and(begins)
    }

    /// The name that the writer gave to a header. Only the mark of an unreadable message is not given back: at a receiver it
    /// means that nobody but the fence before a client library has set it.
    fn own_name<'n>(&self, name: &'n str) -> &'n str {
        let own = name.strip_prefix(OWN).filter(|rest| self.is_taken(rest) && *rest != UNREADABLE_HEADER);
        own.unwrap_or(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENVELOPE: Envelope = Envelope::reserving(&["CC"]).and_prefix("x-broker-");

    fn through(message: &Message) -> Opened {
        let headers = ENVELOPE.headers(message);
        ENVELOPE.open(headers.iter().map(|(name, value)| (name.as_ref(), value.clone())))
    }

    #[test]
    fn a_header_named_like_one_of_ours_comes_back_under_its_name_and_passes_for_nothing() {
        let mut plain = Message::new("orders", "order.placed", "x");
        for name in COLUMNS.into_iter().chain(["CC", "X-Broker-Purge"]) {
            let twice = Envelope::escaped(&Envelope::escaped(name));
            plain = plain.header(name, "own").header(Envelope::escaped(name), "escaped").header(twice, "twice");
        }
        plain = plain.header("postroom-header-", "no name").header("postroom-header-other", "other");
        let full = plain.clone().key("k").tenant("t").aggregate("a", "a-1", 7);
        for sent in [plain, full] {
            let came = through(&sent);
            assert_eq!(came.headers, sent.headers);
            assert_eq!((came.topic.as_deref(), came.key.as_deref()), (Some("orders"), sent.ordering_key()));
            assert_eq!((came.tenant_id, came.aggregate_type), (sent.tenant_id, sent.aggregate_type));
            assert_eq!((came.aggregate_id, came.aggregate_version), (sent.aggregate_id, sent.aggregate_version));
        }
    }

    #[test]
    fn nobody_but_the_fence_says_that_a_message_is_unreadable() {
        let came = through(&Message::new("orders", "order.placed", "x").header(UNREADABLE_HEADER, "forged"));
        assert!(!came.headers.contains_key(UNREADABLE_HEADER));
        assert_eq!(came.headers[&Envelope::escaped(UNREADABLE_HEADER)], "forged");
    }

    #[test]
    fn a_version_that_is_text_and_a_column_that_is_a_number_are_not_from_us() {
        let text = |text: &'static str| HeaderValue::Text(text.into());
        let opened =
            ENVELOPE.open([(AGGREGATE_VERSION, text("7")), (TENANT, HeaderValue::Number(7)), ("n", text("v"))]);
        assert_eq!((opened.aggregate_version, opened.tenant_id), (None, None));
        assert_eq!(opened.headers.len(), 2);
    }
}
