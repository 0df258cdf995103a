//! Pure: AMQP 0-9-1 values as bytes: a reader that never passes its end, and a check of tables with bounded recursion.

use std::fmt;

/// How deep tables and arrays may be nested, the outermost table included. The brokers' own headers use three levels.
pub(super) const DEPTH_MAX: usize = 16;
/// How many values one table may hold, nested ones included. A value of one byte takes fifty in the client library's memory.
pub(super) const VALUES_MAX: usize = 4096;

/// Why bytes are not what they should be; reads before the name of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flaw {
    NotUtf8,
    NameNotUtf8,
    TooDeep,
    TooMany,
    UnknownType(u8),
    LengthsWrong,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotUtf8 => f.write_str("text that is not UTF-8"),
            Self::NameNotUtf8 => f.write_str("a header name that is not UTF-8"),
            Self::TooDeep => write!(f, "tables nested deeper than {DEPTH_MAX} levels"),
            Self::TooMany => write!(f, "more than {VALUES_MAX} values"),
            Self::UnknownType(id) => write!(f, "a value of the unknown type {id:#04x}"),
            Self::LengthsWrong => f.write_str("lengths that do not add up"),
        }
    }
}

/// Reads from the front of some bytes; every method is `None`, or a flaw, when they do not suffice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

/// One field of a table: its name, the type of its value, and the value without the type and the length before it.
pub(super) struct Field<'a> {
    pub(super) name: &'a [u8],
    pub(super) value: Value<'a>,
    /// The whole value as it stands in the frame, type and length included.
    pub(super) raw: &'a [u8],
}

/// A value's type and its content, not yet checked.
pub(super) struct Value<'a> {
    kind: u8,
    content: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.take(1).and_then(|bytes| bytes.first().copied())
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.take(2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.take(4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_be_bytes)
    }

    /// The content of a short string: at most 255 bytes.
    pub(super) fn short(&mut self) -> Option<&'a [u8]> {
        let length = self.u8()?;
        self.take(usize::from(length))
    }

    /// The content of a long string, table, array or byte array.
    pub(super) fn long(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()?;
        self.take(usize::try_from(length).ok()?)
    }

    fn value(&mut self) -> Result<Value<'a>, Flaw> {
        let kind = self.u8().ok_or(Flaw::LengthsWrong)?;
        // The types and sizes that the client library knows; RabbitMQ's `s` is a number, not a short string.
        let content = match kind {
            b'V' => Some(&[][..]),
            b't' | b'b' | b'B' => self.take(1),
            b's' | b'U' | b'u' => self.take(2),
            b'I' | b'i' | b'f' => self.take(4),
            b'D' => self.take(5),
            b'L' | b'l' | b'd' | b'T' => self.take(8),
            b'S' | b'x' | b'A' | b'F' => self.long(),
            _ => return Err(Flaw::UnknownType(kind)),
        };
        Ok(Value { kind, content: content.ok_or(Flaw::LengthsWrong)? })
    }

    /// The next field of a table's content. Its extent is right; what is inside is not checked.
    pub(super) fn field(&mut self) -> Result<Field<'a>, Flaw> {
        let name = self.short().ok_or(Flaw::LengthsWrong)?;
        let from = self.0;
        let value = self.value()?;
        let raw = from.get(..from.len() - self.0.len()).unwrap_or_default();
        Ok(Field { name, value, raw })
    }
}

impl Value<'_> {
    /// Whether the client library can read what is inside. `depth` counts the levels around this value, and `values` those
    /// that may still come.
    pub(super) fn check(&self, depth: usize, values: &mut usize) -> Result<(), Flaw> {
        *values = values.checked_sub(1).ok_or(Flaw::TooMany)?;
        if !matches!(self.kind, b'A' | b'F') {
            return Ok(());
        }
        if depth >= DEPTH_MAX {
            return Err(Flaw::TooDeep);
        }
        let mut inside = Reader(self.content);
        while !inside.is_empty() {
            if self.kind == b'A' {
                inside.value()?.check(depth + 1, values)?;
            } else {
                let field = inside.field()?;
                if std::str::from_utf8(field.name).is_err() {
                    return Err(Flaw::NameNotUtf8);
                }
                field.value.check(depth + 1, values)?;
            }
        }
        Ok(())
    }
}

/// Checks a whole table, given without its length.
pub(super) fn check_table(content: &[u8]) -> Result<(), Flaw> {
    // The table itself counts as a value here.
    Value { kind: b'F', content }.check(0, &mut (VALUES_MAX + 1))
}

/// Bytes as text of at most 255 bytes, with U+FFFD for what is not UTF-8.
pub(super) fn lossy_short(bytes: &[u8]) -> String {
    let mut text = String::from_utf8_lossy(bytes).into_owned();
    let mut end = text.len().min(usize::from(u8::MAX));
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

/// Appends text as a short string. It must not have more than 255 bytes; what is more is cut off.
pub(super) fn put_short(out: &mut Vec<u8>, text: &[u8]) {
    let length = u8::try_from(text.len()).unwrap_or(u8::MAX);
    out.push(length);
    out.extend(text.iter().take(usize::from(length)));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The content of a table with `levels` tables or arrays inside each other, itself included.
    fn nested(levels: usize, kind: u8) -> Vec<u8> {
        let mut content: Vec<u8> = Vec::new();
        for _ in 1..levels {
            let mut outer = if kind == b'F' || content.is_empty() { vec![1, b'a', kind] } else { vec![kind] };
            outer.extend((content.len() as u32).to_be_bytes());
            outer.extend(&content);
            content = outer;
        }
        content
    }

    #[test]
    fn tables_are_nested_as_deep_as_the_limit_and_no_deeper() {
        assert_eq!(check_table(&nested(DEPTH_MAX, b'F')), Ok(()));
        assert_eq!(check_table(&nested(DEPTH_MAX + 1, b'F')), Err(Flaw::TooDeep));
        assert_eq!(check_table(&nested(20_000, b'F')), Err(Flaw::TooDeep));
    }

    #[test]
    fn names_lengths_types_and_numbers_of_values_are_checked() {
        assert_eq!(check_table(b""), Ok(()));
        assert_eq!(check_table(b"\x01at\x01"), Ok(()));
        assert_eq!(check_table(b"\x01\xfft\x01"), Err(Flaw::NameNotUtf8));
        assert_eq!(check_table(b"\x01aF\0\0\0\x04\x01\xfft\x01"), Err(Flaw::NameNotUtf8), "below as well");
        assert_eq!(check_table(b"\x01a?"), Err(Flaw::UnknownType(b'?')));
        assert_eq!(check_table(b"\x02a"), Err(Flaw::LengthsWrong));
        assert_eq!(check_table(b"\x01aS\xff\xff\xff\xff"), Err(Flaw::LengthsWrong));
        let voids = |count: usize| {
            let mut table = b"\x01aA".to_vec();
            table.extend((count as u32).to_be_bytes());
            table.extend(vec![b'V'; count]);
            table
        };
        assert_eq!(check_table(&voids(VALUES_MAX - 1)), Ok(()));
        assert_eq!(check_table(&voids(VALUES_MAX)), Err(Flaw::TooMany));
    }

    #[test]
    fn text_that_is_not_utf8_is_shortened_to_what_a_short_string_holds() {
        let text = lossy_short(&[0xff; 255]);
        assert_eq!((text.len(), text.chars().count()), (255, 85));
        assert_eq!(lossy_short("schön".as_bytes()), "schön");
    }
}
