//! Pure: the properties of one message as the broker sends them, and what is kept of those that the client library cannot read.

use postroom::UNREADABLE_HEADER;

use super::properties::escaped;
use super::wire::{Flaw, Reader, VALUES_MAX, lossy_short, put_short};

/// Class, weight and size of the body: what stands before the properties.
const BEFORE_FLAGS: usize = 12;

enum Kind {
    Short,
    Fixed(usize),
    Table,
}

/// The properties in their order; the first has the highest bit of the flags.
const PROPERTIES: [(&str, Kind); 14] = [
    ("the content type", Kind::Short),
    ("the content encoding", Kind::Short),
    (HEADERS, Kind::Table),
    ("the delivery mode", Kind::Fixed(1)),
    ("the priority", Kind::Fixed(1)),
    ("the correlation id", Kind::Short),
    ("the reply-to", Kind::Short),
    ("the expiration", Kind::Short),
    ("the message id", Kind::Short),
    ("the timestamp", Kind::Fixed(8)),
    ("the type", Kind::Short),
    ("the user id", Kind::Short),
    ("the app id", Kind::Short),
    ("the cluster id", Kind::Short),
];
const HEADERS: &str = "the table of headers";
const HEADERS_BIT: u16 = 1 << 13;

fn bit(index: usize) -> u16 {
    1 << (15 - index)
}

/// Whether the client library may get this payload of a content header frame as it is.
pub(super) fn is_readable(payload: &[u8]) -> bool {
    let mut reader = Reader(payload);
    let (Some(_), Some(flags)) = (reader.take(BEFORE_FLAGS), reader.u16()) else { return false };
    for (index, (_, kind)) in PROPERTIES.iter().enumerate() {
        if flags & bit(index) == 0 {
            continue;
        }
        let fine = match kind {
            Kind::Short => reader.short().is_some_and(|text| std::str::from_utf8(text).is_ok()),
            Kind::Fixed(bytes) => reader.take(*bytes).is_some(),
            Kind::Table => reader.long().is_some_and(headers_are_readable),
        };
        if !fine {
            return false;
        }
    }
    reader.is_empty()
}

fn headers_are_readable(table: &[u8]) -> bool {
    let mut reader = Reader(table);
    let mut values = VALUES_MAX;
    while !reader.is_empty() {
        let Ok(field) = reader.field() else { return false };
        // A sender's own header of this name would pass for the fence's word.
        let fine = std::str::from_utf8(field.name).is_ok() && field.name != UNREADABLE_HEADER.as_bytes();
        if !fine || field.value.check(1, &mut values).is_err() {
            return false;
        }
    }
    true
}

/// The payload of a frame that keeps the size of the body and everything that can be read, and says in the header
/// [`UNREADABLE_HEADER`] what cannot. At most `bytes_max` long, which must be 4,000 or more. None where not even the body's
/// size is there.
pub(super) fn readable(payload: &[u8], bytes_max: usize) -> Option<Vec<u8>> {
    let mut reader = Reader(payload);
    let before = reader.take(BEFORE_FLAGS)?;
    let flags = reader.u16()?;
    let mut kept = Kept::default();
    for (index, (name, kind)) in PROPERTIES.iter().enumerate() {
        if flags & bit(index) == 0 {
            continue;
        }
        if kept.property(&mut reader, index, name, kind).is_none() {
            kept.complain(name, Flaw::LengthsWrong);
            return Some(kept.payload(before, bytes_max));
        }
    }
    if !reader.is_empty() {
        kept.complain("the list of properties", Flaw::LengthsWrong);
    }
    Some(kept.payload(before, bytes_max))
}

#[derive(Default)]
struct Kept {
    flags: u16,
    /// Properties before and after the headers, which are written last.
    before: Vec<u8>,
    headers: Vec<u8>,
    after: Vec<u8>,
    /// The first thing that could not be read.
    reason: Option<String>,
}

impl Kept {
    fn complain(&mut self, what: &str, flaw: Flaw) {
        // Names of headers are short strings too, and shown with escapes: a reason takes no more than 255 bytes.
        self.reason.get_or_insert_with(|| lossy_short(format!("{flaw}: {what}").as_bytes()));
    }

    /// None where the bytes do not suffice.
    fn property(&mut self, reader: &mut Reader<'_>, index: usize, name: &str, kind: &Kind) -> Option<()> {
        match kind {
            Kind::Table => {
                let table = reader.long()?;
                self.keep_headers(table);
            }
            Kind::Fixed(bytes) => {
                let value = reader.take(*bytes)?;
                self.put(index).extend(value);
            }
            Kind::Short => {
                let text = reader.short()?;
                if std::str::from_utf8(text).is_err() {
                    self.complain(name, Flaw::NotUtf8);
                }
                put_short(self.put(index), lossy_short(text).as_bytes());
            }
        }
        self.flags |= bit(index);
        Some(())
    }

    fn put(&mut self, index: usize) -> &mut Vec<u8> {
        if bit(index) > HEADERS_BIT { &mut self.before } else { &mut self.after }
    }

    fn keep_headers(&mut self, table: &[u8]) {
        let mut reader = Reader(table);
        let mut values = VALUES_MAX;
        while !reader.is_empty() {
            let field = match reader.field() {
                Ok(field) => field,
                Err(flaw) => return self.complain(HEADERS, flaw),
            };
            let mut name = lossy_short(field.name);
            if std::str::from_utf8(field.name).is_err() {
                self.complain(HEADERS, Flaw::NameNotUtf8);
            }
            if name == UNREADABLE_HEADER {
                name = escaped(&name);
            }
            match field.value.check(1, &mut values) {
                Ok(()) => {
                    put_short(&mut self.headers, name.as_bytes());
                    self.headers.extend(field.raw);
                }
                Err(flaw) => self.complain(&format!("the header {name:?}"), flaw),
            }
        }
    }

    fn payload(mut self, head: &[u8], bytes_max: usize) -> Vec<u8> {
        // The mark and the flags take less than 1,000 bytes.
        let parts = head.len() + self.before.len() + self.headers.len() + self.after.len();
        if parts + 1000 > bytes_max {
            self.headers.clear();
            self.reason.get_or_insert_with(|| format!("{HEADERS} leaves no room for the header {UNREADABLE_HEADER}"));
        }
        if let Some(reason) = &self.reason {
            put_short(&mut self.headers, UNREADABLE_HEADER.as_bytes());
            self.headers.push(b'S');
            put_long(&mut self.headers, reason.as_bytes());
        }
        let mut payload = head.to_vec();
        payload.extend((self.flags | HEADERS_BIT).to_be_bytes());
        payload.extend(self.before);
        put_long(&mut payload, &self.headers);
        payload.extend(self.after);
        payload
    }
}

fn put_long(out: &mut Vec<u8>, bytes: &[u8]) {
    // Never longer than a frame.
    out.extend(u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend(bytes);
}
