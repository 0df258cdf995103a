//! Pure: a message as an entry of a stream: fields with values, among them the payload.

use bytes::Bytes;
use postroom::envelope::Envelope;
use postroom::{Message, MessageId, UNREADABLE_HEADER};

use super::connection::Commands;
use super::resp::Reply;
use crate::template::Template;
use crate::text_headers::{OCCURRED_MS, TYPE, TextHeaders};

/// The message id.
const ID: &str = "postroom-id";
const CONTENT_TYPE: &str = "content-type";
const PAYLOAD: &str = "payload";
const FIELDS: TextHeaders = TextHeaders {
    id: ID,
    content_type: CONTENT_TYPE,
    envelope: Envelope::reserving(&[ID, TYPE, CONTENT_TYPE, OCCURRED_MS, PAYLOAD]),
};

/// A key may have 512 MiB; nobody means one of more than this.
const STREAM_BYTES_MAX: usize = 4_096;

/// The command that adds a message to a stream. <https://redis.io/docs/latest/commands/xadd/>
pub(super) fn add(commands: &mut Commands, stream: &str, message: &Message) {
    let fields = FIELDS.of(message);
    let mut arguments: Vec<&[u8]> = vec![b"XADD", stream.as_bytes(), b"*"];
    for (name, value) in &fields {
        arguments.extend([name.as_bytes(), value.as_bytes()]);
    }
    arguments.extend([PAYLOAD.as_bytes(), &message.payload[..]]);
    commands.add(arguments);
}

/// The stream of a message, or why it cannot have one.
pub(super) fn stream(template: &Template, message: &Message) -> Result<String, String> {
    let stream = template.of(message).map_err(|field| format!("the stream needs its {field}, and it has none"))?;
    check_stream(&stream)?;
    Ok(stream)
}

/// Whether a stream can be called so.
pub(super) fn check_stream(stream: &str) -> Result<(), String> {
    if stream.is_empty() || stream.len() > STREAM_BYTES_MAX || stream.chars().any(char::is_control) {
        let shown: String = stream.chars().take(100).collect();
        return Err(format!(
            "{shown:?} ({} bytes) can be no stream: it must have 1 to {STREAM_BYTES_MAX} bytes, and no control characters",
            stream.len()
        ));
    }
    Ok(())
}

/// The place of an entry in its stream: milliseconds, and a number within them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryId(pub u64, pub u64);

impl EntryId {
    pub fn parse(text: &str) -> Option<Self> {
        let (ms, number) = text.split_once('-')?;
        Some(Self(ms.parse().ok()?, number.parse().ok()?))
    }

    /// The place before it, whether there is an entry or not.
    pub fn before(self) -> Self {
        match (self.0, self.1) {
            (0, 0) => self,
            (ms, 0) => Self(ms - 1, u64::MAX),
            (ms, number) => Self(ms, number - 1),
        }
    }
}

impl std::fmt::Display for EntryId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.0, self.1)
    }
}

/// An entry as it came.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub at: EntryId,
    fields: Vec<(Bytes, Bytes)>,
}

impl Entry {
    /// Reads one; none: the reply has another shape.
    pub fn read(reply: &Reply) -> Option<Self> {
        let [at, fields] = reply.array()? else { return None };
        let bytes = |reply: &Reply| match reply {
            Reply::Text(text) => Some(text.clone()),
            _ => None,
        };
        let pairs = match fields {
            Reply::Array(fields) => fields.chunks_exact(2),
            // It was deleted meanwhile.
            _ => [].chunks_exact(2),
        };
        let fields = pairs.map(|pair| Some((bytes(&pair[0])?, bytes(&pair[1])?))).collect::<Option<_>>()?;
        Some(Self { at: EntryId::parse(&at.text()?)?, fields })
    }

    /// How many bytes its fields have.
    pub fn bytes(&self) -> u64 {
        self.fields.iter().map(|(name, value)| (name.len() + value.len()) as u64).sum()
    }

    /// The message as far as it can be read. The id is none where there is none, or none of ours.
    pub fn message(self, stream: &str) -> (Option<MessageId>, Message) {
        let (mut payload, mut unreadable, mut found) = (None, false, Vec::with_capacity(self.fields.len()));
        for (name, value) in self.fields {
            if name == PAYLOAD && payload.is_none() {
                payload = Some(value);
                continue;
            }
            match (std::str::from_utf8(&name), std::str::from_utf8(&value)) {
                (Ok(name), Ok(value)) => found.push((name.to_owned(), value.to_owned())),
                _ => unreadable = true,
            }
        }
        // Without the bytes of the whole reply, which may be a thousand times as large.
        let payload = Bytes::copy_from_slice(&payload.unwrap_or_default());
        let (id, mut message) = FIELDS.message(&found, payload);
        if message.topic.is_empty() {
            stream.clone_into(&mut message.topic);
        }
        message.routing_key = Some(stream.to_owned());
        if unreadable {
            message.headers.insert(UNREADABLE_HEADER.to_owned(), "a field is not UTF-8".to_owned());
        }
        (id, message)
    }
}

#[cfg(test)]
mod tests {
    use super::super::resp::Replies;
    use super::*;

    /// What a reader gets of what is added.
    fn sent(message: &Message) -> Entry {
        let mut commands = Commands::default();
        add(&mut commands, "orders", message);
        let mut written = commands.written();
        let Some(Reply::Array(command)) = Replies::default().next(&mut written).unwrap() else { panic!("no command") };
        let at = Reply::Text(Bytes::from_static(b"7-1"));
        Entry::read(&Reply::Array(vec![at, Reply::Array(command[3..].to_vec())])).unwrap()
    }

    #[test]
    fn what_was_sent_is_what_is_received() {
        let message = Message::new("orders", "order.placed", vec![0xff, 0, b'\r', b'\n'])
            .key("k")
            .tenant("t")
            .aggregate("order", "o-1", 7)
            .header("payload", "forged")
            .header("postroom-id", "forged")
            .header("n", "a\r\nb ");
        let entry = sent(&message);
        assert_eq!(entry.at, EntryId(7, 1));
        let (id, received) = entry.message("shop.orders");
        assert_eq!(id, Some(message.id));
        let expected = Message { routing_key: Some("shop.orders".to_owned()), ..message };
        assert_eq!(format!("{received:?}"), format!("{expected:?}"));
    }

    #[test]
    fn foreign_entries_are_read_as_far_as_possible() {
        let text = |text: &[u8]| Reply::Text(Bytes::copy_from_slice(text));
        let of = |fields: Vec<Reply>| Entry::read(&Reply::Array(vec![text(b"7-1"), Reply::Array(fields)]));
        let entry = of(vec![text(b"n\xff"), text(b"v"), text(b"payload"), text(b"x"), text(b"a"), text(b"b")]).unwrap();
        let (id, message) = entry.message("orders");
        assert_eq!((id, message.topic.as_str(), &message.payload[..]), (None, "orders", &b"x"[..]));
        assert!(message.headers.contains_key(UNREADABLE_HEADER) && message.headers["a"] == "b");
        assert!(of(vec![Reply::Nothing, text(b"v")]).is_none());
        let deleted = Entry::read(&Reply::Array(vec![text(b"7-1"), Reply::Nothing])).unwrap();
        assert_eq!(deleted.bytes(), 0);
    }

    #[test]
    fn places_have_neighbours() {
        let at = EntryId::parse("5-0").unwrap();
        assert_eq!(at.before(), EntryId(4, u64::MAX));
        assert_eq!(EntryId(5, 3).before(), EntryId(5, 2));
        assert_eq!(EntryId(0, 0).before(), EntryId(0, 0));
        assert_eq!((at.to_string(), EntryId::parse("x")), ("5-0".to_owned(), None));
    }

    #[test]
    fn names_of_streams_are_checked() {
        let template = Template::parse("shop.{topic}").unwrap();
        let of = |topic: &str| stream(&template, &Message::new(topic, "k", "x"));
        assert_eq!(of("orders").unwrap(), "shop.orders");
        for topic in ["a\nb", &"x".repeat(5_000)] {
            assert!(of(topic).unwrap_err().contains("can be no stream"));
        }
    }
}
