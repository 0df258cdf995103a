//! Pure: the properties of one message as the broker sends them, and what is kept of those that the client library cannot read.

use postroom::UNREADABLE_HEADER;

use super::wire::{Flaw, Reader, VALUES_MAX, lossy_short, put_short};
use postroom::envelope::Envelope;

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
                name = Envelope::escaped(&name);
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

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use lapin::protocol::basic::parse_properties;
    use lapin::types::AMQPValue;
    use proptest::prelude::*;

    use super::*;

    /// A payload of `body_size` 5 with all properties: the strings as given, and the table.
    fn full(text: &[u8], table: &[u8]) -> Vec<u8> {
        let mut payload = vec![0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0xff, 0xfc];
        for (_, kind) in &PROPERTIES {
            match kind {
                Kind::Short => put_short(&mut payload, text),
                Kind::Fixed(bytes) => payload.extend(vec![2; *bytes]),
                Kind::Table => put_long(&mut payload, table),
            }
        }
        payload
    }

    /// What the client library makes of it.
    fn read(payload: &[u8]) -> Option<BasicProperties> {
        let (rest, properties) = parse_properties(&payload[BEFORE_FLAGS..]).ok()?;
        rest.is_empty().then_some(properties)
    }

    fn header(properties: &BasicProperties, name: &str) -> Option<String> {
        match properties.headers().as_ref()?.inner().get(name)? {
            AMQPValue::LongString(text) => Some(text.to_string()),
            other => Some(format!("{other:?}")),
        }
    }

    #[test]
    fn what_can_be_read_is_kept_beside_the_reason() {
        let table = b"\x01aS\0\0\0\x01x\x03\xffbtt\x01\x04deepF\0\0\0\x04\x01\xfft\x01\x01zS\0\0\0\x01y";
        let payload = full(b"text", table);
        assert!(!is_readable(&payload) && is_readable(&full(b"text", b"\x01at\x01")));
        let instead = readable(&payload, 4088).unwrap();
        assert_eq!(instead[..BEFORE_FLAGS], payload[..BEFORE_FLAGS], "the size of the body");
        let properties = read(&instead).unwrap();
        assert_eq!(properties.message_id().as_ref().unwrap().as_str(), "text");
        assert_eq!(properties.kind().as_ref().unwrap().as_str(), "text");
        assert_eq!((properties.delivery_mode(), properties.timestamp().is_some()), (&Some(2), true));
        assert_eq!(header(&properties, "a").as_deref(), Some("x"));
        assert_eq!(header(&properties, "z").as_deref(), Some("y"));
        assert!(header(&properties, "\u{fffd}bt").is_some() && header(&properties, "deep").is_none());
        let reason = header(&properties, UNREADABLE_HEADER).unwrap();
        assert_eq!(reason, "a header name that is not UTF-8: the table of headers");
    }

    #[test]
    fn text_that_is_not_utf8_is_carried_with_replacements_and_told() {
        let properties = read(&readable(&full(&[0xff; 255], b""), 4088).unwrap()).unwrap();
        assert_eq!(properties.content_type().as_ref().unwrap().as_str(), "\u{fffd}".repeat(85));
        let reason = header(&properties, UNREADABLE_HEADER).unwrap();
        assert_eq!(reason, "text that is not UTF-8: the content type");
    }

    #[test]
    fn headers_that_leave_no_room_for_the_reason_are_left_out() {
        let mut table = b"\x01aS\0\x01\0\0".to_vec();
        table.extend(vec![b'x'; 0x1_0000]);
        let fits = readable(&full(b"\xff", &table), 70_000).unwrap();
        assert!(header(&read(&fits).unwrap(), "a").is_some());
        let cut = readable(&full(b"\xff", &table), 66_000).unwrap();
        let properties = read(&cut).unwrap();
        assert!(header(&properties, "a").is_none() && header(&properties, UNREADABLE_HEADER).is_some());
    }

    #[test]
    fn a_senders_own_mark_arrives_under_another_name() {
        let mut table = Vec::new();
        put_short(&mut table, UNREADABLE_HEADER.as_bytes());
        table.extend(b"S\0\0\0\x06forged");
        let properties = read(&readable(&full(b"text", &table), 4088).unwrap()).unwrap();
        assert_eq!(header(&properties, UNREADABLE_HEADER), None);
        assert_eq!(header(&properties, &Envelope::escaped(UNREADABLE_HEADER)).as_deref(), Some("forged"));
    }

    /// Bytes near to what a sender may write: right in most places.
    fn payloads() -> impl Strategy<Value = Vec<u8>> {
        let text = prop_oneof![4 => "[a-zé]{0,9}".prop_map(String::into_bytes), 1 => prop::collection::vec(any::<u8>(), 0..255)];
        let leaf = prop_oneof![
            Just(b"V".to_vec()),
            any::<[u8; 1]>().prop_map(|bytes| [b"t".as_slice(), &bytes].concat()),
            any::<[u8; 8]>().prop_map(|bytes| [b"l".as_slice(), &bytes].concat()),
            "[a-z]{0,9}".prop_map(|text| [b"S\0\0\0".as_slice(), &[text.len() as u8], text.as_bytes()].concat()),
        ];
        let value = leaf.prop_recursive(20, 64, 3, |inner| {
            (any::<bool>(), prop::collection::vec(inner, 0..3)).prop_map(|(array, values)| {
                let mut content = Vec::new();
                for value in values {
                    content.extend(if array { &b""[..] } else { &b"\x01n"[..] });
                    content.extend(value);
                }
                let mut whole = vec![if array { b'A' } else { b'F' }];
                put_long(&mut whole, &content);
                whole
            })
        });
        let table = prop::collection::vec((text.clone(), value), 0..4).prop_map(|fields| {
            let mut table = Vec::new();
            for (name, value) in fields {
                put_short(&mut table, &name);
                table.extend(value);
            }
            table
        });
        let flip = (any::<prop::sample::Index>(), any::<u8>());
        (text, table, prop::collection::vec(flip, 0..3)).prop_map(|(text, table, flips)| {
            let mut payload = full(&text, &table);
            for (index, byte) in flips {
                let length = payload.len();
                payload[index.index(length)] = byte;
            }
            payload
        })
    }

    proptest! {
        #[test]
        fn the_client_library_reads_whatever_is_handed_on(payload in payloads()) {
            if is_readable(&payload) {
                prop_assert!(read(&payload).is_some());
            }
            let instead = readable(&payload, 4088).unwrap();
            prop_assert!(instead.len() <= 4088 && read(&instead).is_some());
        }

        #[test]
        fn arbitrary_bytes_are_no_danger(payload in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Some(instead) = readable(&payload, 4088) {
                prop_assert!(read(&instead).is_some());
            }
            prop_assert!(!is_readable(&payload) || read(&payload).is_some());
        }
    }
}
