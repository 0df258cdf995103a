//! Pure: NATS's client protocol, as far as a publisher and a consumer of JetStream need it.
//! <https://docs.nats.io/reference/reference-protocols/nats-protocol>
//!
//! What comes is read within limits, and as bytes: a message that another client wrote badly costs nothing but itself.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::Deserialize;

/// Longest line that a server may send. `INFO` is the longest: it names every server of a cluster.
const LINE_MAX: usize = 256 << 10;
/// Largest message, headers included; the largest `max_payload` that a server can have.
const MESSAGE_MAX: usize = 64 << 20;
/// What the lines of a block of headers begin with.
const HEADERS_BEGIN: &[u8] = b"NATS/1.0";

/// What a server says of itself.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Info {
    /// Its version, such as `2.12.1`.
    pub version: String,
    /// Largest message that it takes, in bytes, headers included.
    pub max_payload: usize,
    /// Whether it knows headers.
    pub headers: bool,
    /// Whether clients must use TLS.
    pub tls_required: bool,
    /// Whether clients may use TLS.
    pub tls_available: bool,
    /// What a client signs that proves itself by a key.
    pub nonce: Option<String>,
}

impl Info {
    /// Whether the server's version is at least this one. A version that cannot be read is not.
    pub fn is_at_least(&self, major: u32, minor: u32) -> bool {
        let mut parts = self.version.split('.').map(|part| part.parse::<u32>());
        matches!((parts.next(), parts.next()), (Some(Ok(found)), Some(Ok(then))) if (found, then) >= (major, minor))
    }
}

/// One message as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Inbound {
    /// Which subscription of this connection it is for.
    pub sid: u64,
    /// The subject that it was published to.
    pub subject: String,
    /// Where an answer goes.
    pub reply: Option<String>,
    /// The block of headers, unread; empty where there is none.
    pub headers: Bytes,
    /// The payload.
    pub payload: Bytes,
}

impl Inbound {
    /// The status of a message that the server itself sent, with its text.
    pub fn status(&self) -> Option<(u16, String)> {
        let rest = self.headers.strip_prefix(HEADERS_BEGIN)?;
        let line = rest.split(|byte| *byte == b'\r' || *byte == b'\n').next()?;
        let line = String::from_utf8_lossy(line);
        let (code, text) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        Some((code.parse().ok()?, text.to_owned()))
    }

    /// Its headers in the order in which they came. A line that is none is left out; text that is not UTF-8 is shown as well as it can be.
    pub fn headers(&self) -> Vec<(String, String)> {
        let lines = self.headers.split(|byte| *byte == b'\n').skip(1);
        let header = |line: &[u8]| {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let colon = line.iter().position(|byte| *byte == b':')?;
            let (name, value) = (&line[..colon], &line[colon + 1..]);
            let value = value.strip_prefix(b" ").unwrap_or(value);
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            (!name.is_empty()).then(|| (text(name), text(value)))
        };
        lines.filter_map(header).collect()
    }
}

/// One thing that a server says.
#[derive(Debug)]
pub(super) enum Said {
    Info(Box<Info>),
    Message(Inbound),
    Ping,
    Pong,
    Fine,
    Error(String),
}

/// Takes the next thing out of what has come; none: it has not come whole.
pub(super) fn next(read: &mut BytesMut) -> Result<Option<Said>, String> {
    let Some(end) = read.windows(2).take(LINE_MAX).position(|bytes| bytes == b"\r\n") else {
        return if read.len() > LINE_MAX { Err(format!("a line has more than {LINE_MAX} bytes")) } else { Ok(None) };
    };
    let line = &read[..end];
    let (verb, rest) = match line.iter().position(|byte| *byte == b' ' || *byte == b'\t') {
        Some(space) => (&line[..space], line[space + 1..].trim_ascii()),
        None => (line, &line[end..]),
    };
    let is = |name: &str| verb.eq_ignore_ascii_case(name.as_bytes());
    let said = if is("MSG") || is("HMSG") {
        return message(read, end, is("HMSG"));
    } else if is("PING") {
        Said::Ping
    } else if is("PONG") {
        Said::Pong
    } else if is("+OK") {
        Said::Fine
    } else if is("-ERR") {
        Said::Error(String::from_utf8_lossy(rest).trim_matches('\'').to_owned())
    } else if is("INFO") {
        let info =
            serde_json::from_slice(rest).map_err(|error| format!("what it says of itself is no JSON: {error}"))?;
        Said::Info(Box::new(info))
    } else {
        let shown: String = String::from_utf8_lossy(verb).chars().take(20).collect();
        return Err(format!("{shown:?} is no word of NATS's protocol; does another program listen there?"));
    };
    read.advance(end + 2);
    Ok(Some(said))
}

/// `MSG subject sid [reply] bytes` and `HMSG subject sid [reply] header-bytes all-bytes`, whose line ends at `end`.
fn message(read: &mut BytesMut, end: usize, with_headers: bool) -> Result<Option<Said>, String> {
    let line = String::from_utf8_lossy(&read[..end]).into_owned();
    let words: Vec<&str> = line.split_ascii_whitespace().skip(1).collect();
    let wrong = || "a line about a message is not as the protocol has it".to_owned();
    let sizes = if with_headers { 2 } else { 1 };
    let (subject, sid, reply) = match words.get(..words.len().saturating_sub(sizes)) {
        Some([subject, sid]) => (*subject, *sid, None),
        Some([subject, sid, reply]) => (*subject, *sid, Some((*reply).to_owned())),
        _ => return Err(wrong()),
    };
    let size = |from_end: usize| words[words.len() - from_end].parse::<usize>().map_err(|_| wrong());
    let total = size(1)?;
    let headers = if with_headers { size(2)? } else { 0 };
    if total > MESSAGE_MAX || headers > total {
        return Err(format!("a message of {total} bytes with {headers} bytes of headers"));
    }
    let sid = sid.parse().map_err(|_| wrong())?;
    let whole = end + 2 + total + 2;
    if read.len() < whole {
        read.reserve(whole - read.len());
        return Ok(None);
    }
    let subject = subject.to_owned();
    read.advance(end + 2);
    let headers = read.split_to(headers).freeze();
    let payload = read.split_to(total - headers.len()).freeze();
    read.advance(2);
    Ok(Some(Said::Message(Inbound { sid, subject, reply, headers, payload })))
}

/// Appends a publication. Neither subject nor reply contains a space or a line break; headers are names and values that can be carried.
pub(super) fn publish<'h>(
    into: &mut BytesMut,
    subject: &str,
    reply: Option<&str>,
    headers: impl IntoIterator<Item = (&'h str, &'h str)>,
    payload: &[u8],
) {
    let mut block = BytesMut::new();
    for (name, value) in headers {
        if block.is_empty() {
            block.put_slice(HEADERS_BEGIN);
            block.put_slice(b"\r\n");
        }
        for part in [name, ": ", value, "\r\n"] {
            block.put_slice(part.as_bytes());
        }
    }
    let reply = reply.map(|reply| format!(" {reply}")).unwrap_or_default();
    let line = if block.is_empty() {
        format!("PUB {subject}{reply} {}\r\n", payload.len())
    } else {
        block.put_slice(b"\r\n");
        format!("HPUB {subject}{reply} {} {}\r\n", block.len(), block.len() + payload.len())
    };
    into.reserve(line.len() + block.len() + payload.len() + 2);
    into.put_slice(line.as_bytes());
    into.put_slice(&block);
    into.put_slice(payload);
    into.put_slice(b"\r\n");
}

/// Whether a header can travel as it is.
pub(super) fn is_carried(name: &str, value: &str) -> bool {
    let is_name = |byte: u8| byte.is_ascii_graphic() && byte != b':';
    // Clients of NATS trim what is around a value.
    let is_value = !value.contains(['\r', '\n', '\0']) && value.trim() == value;
    !name.is_empty() && name.bytes().all(is_name) && is_value
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(bytes: &[u8]) -> Vec<Said> {
        let mut read = BytesMut::from(bytes);
        std::iter::from_fn(|| next(&mut read).unwrap()).collect()
    }

    #[test]
    fn a_publication_is_read_as_the_message_that_it_was() {
        let mut written = BytesMut::new();
        publish(&mut written, "a.b", Some("r.1"), [("n", "v"), ("empty", "")], b"x\r\ny");
        let text = String::from_utf8(written.to_vec()).unwrap();
        assert!(text.starts_with("HPUB a.b r.1 27 31\r\nNATS/1.0\r\nn: v\r\nempty: \r\n\r\nx\r\ny\r\n"), "{text:?}");
        let said = all(text.replace("HPUB a.b r.1", "HMSG a.b 7 r.1").as_bytes());
        let [Said::Message(came)] = said.as_slice() else { panic!("{said:?}") };
        assert_eq!((came.sid, came.reply.as_deref(), &came.payload[..]), (7, Some("r.1"), &b"x\r\ny"[..]));
        let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(came.headers(), [header("n", "v"), header("empty", "")]);
        written.clear();
        publish(&mut written, "a", None, [], b"x");
        assert_eq!(&written[..], b"PUB a 1\r\nx\r\n");
    }

    #[test]
    fn what_another_client_wrote_badly_is_read_as_well_as_it_can_be() {
        let block = b"NATS/1.0\r\nlatin: \xe9\r\nno colon\r\n: no name\r\nlast:  v \r\n\r\n";
        let mut bytes = format!("HMSG s 1 {0} {0}\r\n", block.len()).into_bytes();
        bytes.extend_from_slice(block);
        bytes.extend_from_slice(b"\r\nPING\r\n");
        let said = all(&bytes);
        let [Said::Message(came), Said::Ping] = said.as_slice() else { panic!("{said:?}") };
        let expected = [("latin", "\u{fffd}"), ("last", " v ")].map(|(n, v)| (n.to_owned(), v.to_owned()));
        assert_eq!(came.headers(), expected);
    }

    #[test]
    fn a_status_is_not_a_header() {
        let block = b"NATS/1.0 409 Consumer Deleted\r\n\r\n";
        let mut bytes = format!("HMSG s 1 {0} {0}\r\n", block.len()).into_bytes();
        bytes.extend_from_slice(block);
        bytes.extend_from_slice(b"\r\n");
        let said = all(&bytes);
        let [Said::Message(came)] = said.as_slice() else { panic!("{said:?}") };
        assert_eq!(came.status(), Some((409, "Consumer Deleted".to_owned())));
        assert!(came.headers().is_empty());
    }

    #[test]
    fn what_is_no_nats_is_an_error() {
        for bytes in
            [&b"HTTP/1.1 400 Bad Request\r\n"[..], b"MSG a\r\n", b"MSG a 1 99999999999\r\n", b"HMSG a 1 9 3\r\n"]
        {
            assert!(next(&mut BytesMut::from(bytes)).is_err(), "{bytes:?}");
        }
        assert!(next(&mut BytesMut::from(&vec![b'x'; LINE_MAX + 2][..])).is_err());
    }

    proptest! {
        #[test]
        fn nothing_that_comes_panics(bytes in prop::collection::vec(prop_oneof![any::<u8>(), Just(b'\r'), Just(b'\n'), Just(b' ')], 0..200), verb in "(MSG|HMSG|INFO|-ERR|PING|)") {
            let mut read = BytesMut::from(verb.as_bytes());
            read.extend_from_slice(&bytes);
            while let Ok(Some(said)) = next(&mut read) {
                if let Said::Message(message) = said {
                    let _ = (message.status(), message.headers());
                }
            }
        }
    }
}
