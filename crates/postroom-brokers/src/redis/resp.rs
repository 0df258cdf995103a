//! Pure: RESP2, Redis's protocol, as far as a client needs it. <https://redis.io/docs/latest/develop/reference/protocol-spec/>
//!
//! What comes is read within limits; bytes that were looked at are not looked at again when more of a long reply arrive.

use bytes::{BufMut, Bytes, BytesMut};

/// Longest line: a number, a status or an error.
const LINE_MAX: usize = 64 << 10;
/// Largest string, as servers have it (`proto-max-bulk-len`).
pub(super) const STRING_MAX: usize = 512 << 20;
/// Largest reply.
const REPLY_MAX: usize = 1 << 30;
/// Most elements of one array, and the deepest that arrays are in arrays.
const ELEMENTS_MAX: usize = 4 << 20;
const DEPTH_MAX: usize = 16;

/// What a server says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply {
    /// A status, or a string.
    Text(Bytes),
    Error(String),
    Number(i64),
    Nothing,
    Array(Vec<Reply>),
}

impl Reply {
    pub fn text(&self) -> Option<String> {
        match self {
            Self::Text(text) => Some(String::from_utf8_lossy(text).into_owned()),
            _ => None,
        }
    }

    pub fn number(&self) -> Option<i64> {
        match self {
            Self::Number(number) => Some(*number),
            _ => None,
        }
    }

    pub fn array(&self) -> Option<&[Self]> {
        match self {
            Self::Array(elements) => Some(elements),
            _ => None,
        }
    }

    /// The value behind this name, in an array of names and values.
    pub fn field(&self, name: &str) -> Option<&Self> {
        let pairs = self.array()?.chunks_exact(2);
        pairs.filter(|pair| matches!(&pair[0], Self::Text(text) if text == name)).map(|pair| &pair[1]).next()
    }
}

/// Adds a command.
pub(super) fn command<A: AsRef<[u8]>>(into: &mut BytesMut, arguments: impl ExactSizeIterator<Item = A>) {
    header(into, b'*', arguments.len());
    for argument in arguments {
        let argument = argument.as_ref();
        header(into, b'$', argument.len());
        into.put_slice(argument);
        into.put_slice(b"\r\n");
    }
}

fn header(into: &mut BytesMut, kind: u8, length: usize) {
    into.put_u8(kind);
    into.put_slice(length.to_string().as_bytes());
    into.put_slice(b"\r\n");
}

/// Finds where replies end.
#[derive(Debug, Default)]
pub(super) struct Replies {
    /// Looked at up to here.
    at: usize,
    /// Elements that are still to come, of each array that is open.
    open: Vec<usize>,
}

/// One element's beginning.
enum Element {
    Text { length: usize },
    Line,
    Nothing,
    Array { length: usize },
}

impl Replies {
    /// Takes the next whole reply out of what has come; none: more has to come. After an error nothing of it can be read.
    pub fn next(&mut self, from: &mut BytesMut) -> Result<Option<Reply>, String> {
        loop {
            let Some((element, behind)) = element(from, self.at)? else {
                return if from.len() > REPLY_MAX { Err("a reply has no end".to_owned()) } else { Ok(None) };
            };
            let end = match element {
                Element::Text { length } => behind + length + 2,
                Element::Line | Element::Nothing => behind,
                Element::Array { length } => {
                    self.at = behind;
                    if length > 0 {
                        if self.open.len() >= DEPTH_MAX {
                            return Err(format!("arrays in arrays, more than {DEPTH_MAX} deep"));
                        }
                        self.open.push(length);
                        continue;
                    }
                    behind
                }
            };
            if end > REPLY_MAX {
                return Err(format!("a reply of more than {REPLY_MAX} bytes"));
            }
            if from.len() < end {
                return Ok(None);
            }
            self.at = end;
            while let Some(left) = self.open.last_mut() {
                *left -= 1;
                if *left > 0 {
                    break;
                }
                self.open.pop();
            }
            if self.open.is_empty() {
                let whole = from.split_to(std::mem::take(&mut self.at)).freeze();
                return read(&whole, &mut 0).map(Some);
            }
        }
    }
}

/// The element that begins at `at`, and what is behind its line; none: its line has not come whole.
fn element(bytes: &[u8], at: usize) -> Result<Option<(Element, usize)>, String> {
    let rest = bytes.get(at..).unwrap_or_default();
    let Some(end) = rest.iter().take(LINE_MAX).position(|byte| *byte == b'\n') else {
        return if rest.len() < LINE_MAX { Ok(None) } else { Err("a line of more than 64 KiB".to_owned()) };
    };
    let line = rest[..end].strip_suffix(b"\r").ok_or("a line without its end")?;
    let (kind, value) = line.split_first().ok_or("an empty line")?;
    let length = |most: usize| -> Result<Option<usize>, String> {
        let number = std::str::from_utf8(value).ok().and_then(|value| value.parse::<i64>().ok());
        match number {
            Some(-1) => Ok(None),
            Some(number) => match usize::try_from(number) {
                Ok(number) if number <= most => Ok(Some(number)),
                _ => Err(format!("a length of {number}")),
            },
            None => Err("a length that is no number".to_owned()),
        }
    };
    let element = match kind {
        b'+' | b'-' | b':' => Element::Line,
        b'$' => length(STRING_MAX)?.map_or(Element::Nothing, |length| Element::Text { length }),
        b'*' => length(ELEMENTS_MAX)?.map_or(Element::Nothing, |length| Element::Array { length }),
        _ => return Err("bytes that are not Redis's protocol; does another program listen there?".to_owned()),
    };
    Ok(Some((element, at + end + 1)))
}

/// Reads a reply that is there whole.
fn read(whole: &Bytes, at: &mut usize) -> Result<Reply, String> {
    let cut = || "a reply that is cut off".to_owned();
    let begin = *at;
    let (element, behind) = element(whole, begin)?.ok_or_else(cut)?;
    *at = behind;
    match element {
        Element::Nothing => Ok(Reply::Nothing),
        Element::Text { length } => {
            let end = behind + length;
            if whole.get(end..end + 2) != Some(b"\r\n") {
                return Err("a string that is longer than it says".to_owned());
            }
            *at = end + 2;
            Ok(Reply::Text(whole.slice(behind..end)))
        }
        Element::Array { length } => {
            // No more than what is there: each element has at least three bytes.
            let mut elements = Vec::with_capacity(length.min(whole.len() / 3));
            for _ in 0..length {
                elements.push(read(whole, at)?);
            }
            Ok(Reply::Array(elements))
        }
        Element::Line => {
            let value = whole.slice(begin + 1..behind - 2);
            let text = || String::from_utf8_lossy(&value).into_owned();
            Ok(match whole[begin] {
                b'-' => Reply::Error(text()),
                b':' => Reply::Number(text().parse().map_err(|_| "a number that is none".to_owned())?),
                _ => Reply::Text(value),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(text: &str) -> Reply {
        Reply::Text(Bytes::copy_from_slice(text.as_bytes()))
    }

    #[test]
    fn commands_and_replies_are_written_and_read() {
        let mut written = BytesMut::new();
        command(&mut written, ["XADD", "", "ä\r\n"].into_iter());
        assert_eq!(&written[..], "*3\r\n$4\r\nXADD\r\n$0\r\n\r\n$4\r\nä\r\n\r\n".as_bytes());
        let mut came =
            BytesMut::from("+OK\r\n-ERR no\r\n:-7\r\n$-1\r\n*-1\r\n*0\r\n*3\r\n$1\r\na\r\n*1\r\n:1\r\n$0\r\n\r\n+half");
        let mut replies = Replies::default();
        let mut read = Vec::new();
        while let Some(reply) = replies.next(&mut came).unwrap() {
            read.push(reply);
        }
        let nested = Reply::Array(vec![text("a"), Reply::Array(vec![Reply::Number(1)]), text("")]);
        let (ok, no) = (text("OK"), Reply::Error("ERR no".to_owned()));
        let expected =
            [ok, no, Reply::Number(-7), Reply::Nothing, Reply::Nothing, Reply::Array(Vec::new()), nested.clone()];
        assert_eq!(read, expected);
        assert_eq!(&came[..], b"+half");
        assert_eq!(Reply::Array(vec![text("n"), Reply::Number(3)]).field("n"), Some(&Reply::Number(3)));
        assert_eq!(nested.field("n"), None);
    }

    #[test]
    fn what_is_not_the_protocol_is_an_error_and_takes_no_memory() {
        let deep = "*1\r\n".repeat(100);
        let long = format!("+{}", "x".repeat(100_000));
        for bad in [
            "HTTP/1.1 400\r\n",
            "$x\r\n",
            "$-2\r\n",
            "$9999999999\r\n",
            "*99999999999\r\n",
            "$1\r\nabc\r\n",
            "\r\n",
            "+\n",
            &deep,
            &long,
        ] {
            assert!(Replies::default().next(&mut BytesMut::from(bad)).is_err(), "{bad:.20}");
        }
        assert_eq!(Replies::default().next(&mut BytesMut::from("*4000000\r\n")), Ok(None));
    }

    fn reply() -> impl Strategy<Value = Reply> {
        let leaf = prop_oneof![
            prop::collection::vec(any::<u8>(), 0..40).prop_map(|bytes| Reply::Text(bytes.into())),
            any::<i64>().prop_map(Reply::Number),
            Just(Reply::Nothing),
            "[A-Z ]{0,10}".prop_map(Reply::Error),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| prop::collection::vec(inner, 0..6).prop_map(Reply::Array))
    }

    fn write(into: &mut BytesMut, reply: &Reply) {
        match reply {
            Reply::Text(text) => {
                header(into, b'$', text.len());
                into.put_slice(text);
                into.put_slice(b"\r\n");
            }
            Reply::Error(text) => into.put_slice(format!("-{text}\r\n").as_bytes()),
            Reply::Number(number) => into.put_slice(format!(":{number}\r\n").as_bytes()),
            Reply::Nothing => into.put_slice(b"$-1\r\n"),
            Reply::Array(elements) => {
                header(into, b'*', elements.len());
                elements.iter().for_each(|element| write(into, element));
            }
        }
    }

    proptest! {
        #[test]
        fn replies_are_read_in_whatever_pieces_they_come(all in prop::collection::vec(reply(), 1..5), piece in 1usize..50) {
            let mut written = BytesMut::new();
            all.iter().for_each(|reply| write(&mut written, reply));
            let (mut came, mut replies, mut read) = (BytesMut::new(), Replies::default(), Vec::new());
            for piece in written.chunks(piece) {
                came.put_slice(piece);
                while let Some(reply) = replies.next(&mut came).unwrap() {
                    read.push(reply);
                }
            }
            prop_assert_eq!(read, all);
            prop_assert!(came.is_empty());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut came = BytesMut::from(&bytes[..]);
            let mut replies = Replies::default();
            while let Ok(Some(_)) = replies.next(&mut came) {}
        }
    }
}
