//! Pure: the types of AMQP 1.0 as bytes. Nothing here calls itself by what it reads: every value says its own size, and one that is not
//! understood is passed over by it. <https://docs.oasis-open.org/amqp/core/v1.0/os/amqp-core-types-v1.0-os.html>

use bytes::{BufMut, BytesMut};

/// What a value that could not be read is called.
const CUT_OFF: &str = "a value is cut off";
/// Values that are described are described by a number or a name, in real messages once.
const DESCRIBED_MAX: usize = 4;

/// A value to be written.
#[derive(Debug, Clone, Copy)]
pub(super) enum Field<'a> {
    Null,
    Bool(bool),
    Ubyte(u8),
    Ushort(u16),
    Uint(u32),
    Ulong(u64),
    Long(i64),
    /// Milliseconds since 1970.
    Timestamp(i64),
    Text(&'a str),
    Symbol(&'a str),
    Binary(&'a [u8]),
    /// An array of them.
    Symbols(&'a [&'a str]),
    /// A list with a descriptor.
    Composite(u64, &'a [Field<'a>]),
    Map(&'a [(Field<'a>, Field<'a>)]),
}

/// Writes one. Depth and size are those of the caller's own code.
pub(super) fn put(into: &mut BytesMut, field: Field<'_>) {
    match field {
        Field::Null => into.put_u8(0x40),
        Field::Bool(value) => into.put_u8(if value { 0x41 } else { 0x42 }),
        Field::Ubyte(value) => into.put_slice(&[0x50, value]),
        Field::Ushort(value) => {
            into.put_u8(0x60);
            into.put_u16(value);
        }
        Field::Uint(0) => into.put_u8(0x43),
        Field::Uint(value) => {
            into.put_u8(0x70);
            into.put_u32(value);
        }
        Field::Ulong(value) => match u8::try_from(value) {
            Ok(small) => into.put_slice(&[0x53, small]),
            Err(_) => {
                into.put_u8(0x80);
                into.put_u64(value);
            }
        },
        Field::Long(value) => {
            into.put_u8(0x81);
            into.put_i64(value);
        }
        Field::Timestamp(value) => {
            into.put_u8(0x83);
            into.put_i64(value);
        }
        Field::Text(text) => put_variable(into, 0xa1, text.as_bytes()),
        Field::Symbol(text) => put_variable(into, 0xa3, text.as_bytes()),
        Field::Binary(bytes) => put_variable(into, 0xa0, bytes),
        Field::Symbols(symbols) => {
            into.put_u8(0xf0);
            let at = into.len();
            into.put_u32(0);
            into.put_u32(symbols.len() as u32);
            // What kind all of them are.
            into.put_u8(0xb3);
            for symbol in symbols {
                into.put_u32(symbol.len() as u32);
                into.put_slice(symbol.as_bytes());
            }
            set_size(into, at);
        }
        Field::Composite(descriptor, fields) => {
            put_composite(into, descriptor, fields);
        }
        Field::Map(pairs) => {
            into.put_u8(0xd1);
            sized(into, (pairs.len() * 2) as u32, |into| {
                for (name, value) in pairs {
                    put(into, *name);
                    put(into, *value);
                }
            });
        }
    }
}

/// Writes a list with a descriptor: a performative, an outcome, a section.
pub(super) fn put_composite(into: &mut BytesMut, descriptor: u64, fields: &[Field<'_>]) {
    put_descriptor(into, descriptor);
    into.put_u8(0xd0);
    sized(into, fields.len() as u32, |into| fields.iter().for_each(|field| put(into, *field)));
}

/// What follows is described by it.
pub(super) fn put_descriptor(into: &mut BytesMut, descriptor: u64) {
    into.put_u8(0x00);
    put(into, Field::Ulong(descriptor));
}

/// The size of what `write` writes, with the number of its items, before it.
fn sized(into: &mut BytesMut, count: u32, write: impl FnOnce(&mut BytesMut)) {
    let at = into.len();
    into.put_u32(0);
    into.put_u32(count);
    write(into);
    set_size(into, at);
}

/// The size of what is behind a number of four bytes, in that number.
fn set_size(into: &mut BytesMut, at: usize) {
    let size = (into.len() - at - 4) as u32;
    into[at..at + 4].copy_from_slice(&size.to_be_bytes());
}

/// `code` is that of the short form.
fn put_variable(into: &mut BytesMut, code: u8, bytes: &[u8]) {
    match u8::try_from(bytes.len()) {
        Ok(length) => into.put_slice(&[code, length]),
        Err(_) => {
            into.put_u8(code | 0x10);
            into.put_u32(bytes.len() as u32);
        }
    }
    into.put_slice(bytes);
}

/// What is still to be read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'b>(pub &'b [u8]);

/// A value that was read, as far as this client uses any.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value<'b> {
    Null,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    /// Milliseconds since 1970.
    Timestamp(i64),
    /// As it was sent; texts are checked where they are used.
    Text(&'b [u8]),
    Symbol(&'b [u8]),
    Binary(&'b [u8]),
    Uuid([u8; 16]),
    List(List<'b>),
    Map(List<'b>),
    /// With its format code.
    Array(&'b [u8]),
    Described(Descriptor, &'b [u8]),
    /// Decimals, floats and characters.
    Other,
}

/// What describes a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Descriptor {
    Number(u64),
    Other,
}

/// The items of a list, or names and values of a map by turns.
#[derive(Debug, Clone, Copy)]
pub(super) struct List<'b> {
    pub count: u32,
    pub items: Reader<'b>,
}

impl<'b> Reader<'b> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn take(&mut self, bytes: usize) -> Result<&'b [u8], String> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(CUT_OFF)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(CUT_OFF)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub fn u8(&mut self) -> Result<u8, String> {
        self.number::<1>().map(|[byte]| byte)
    }

    pub fn u16(&mut self) -> Result<u16, String> {
        self.number().map(u16::from_be_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, String> {
        self.number().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.number().map(u64::from_be_bytes)
    }

    /// Passes over one value, of whatever kind.
    fn skip(&mut self) -> Result<(), String> {
        for _ in 0..=DESCRIBED_MAX {
            match self.u8()? {
                // A descriptor, and what it describes. The descriptor may not be described itself.
                0x00 => self.skip_plain()?,
                code => return self.skip_behind(code),
            }
        }
        Err("a value is described too often".to_owned())
    }

    fn skip_plain(&mut self) -> Result<(), String> {
        match self.u8()? {
            0x00 => Err("a descriptor is described itself".to_owned()),
            code => self.skip_behind(code),
        }
    }

    /// The upper half of a format code says how long a value is.
    fn skip_behind(&mut self, code: u8) -> Result<(), String> {
        let bytes = match code >> 4 {
            0x4 => 0,
            0x5 => 1,
            0x6 => 2,
            0x7 => 4,
            0x8 => 8,
            0x9 => 16,
            0xa | 0xc | 0xe => usize::from(self.u8()?),
            0xb | 0xd | 0xf => self.u32()? as usize,
            _ => return Err(format!("0x{code:02x} is no format code of AMQP 1.0")),
        };
        self.take(bytes).map(drop)
    }

    /// The next value.
    pub fn value(&mut self) -> Result<Value<'b>, String> {
        let before = self.0;
        let value = match self.u8()? {
            0x00 => {
                let descriptor = match self.value_of_descriptor()? {
                    Value::Unsigned(number) => Descriptor::Number(number),
                    _ => Descriptor::Other,
                };
                let start = self.0;
                self.skip()?;
                Value::Described(descriptor, &start[..start.len() - self.0.len()])
            }
            0x40 => Value::Null,
            0x41 => Value::Bool(true),
            0x42 => Value::Bool(false),
            0x56 => Value::Bool(self.u8()? != 0),
            0x43 | 0x44 => Value::Unsigned(0),
            0x50 | 0x52 | 0x53 => Value::Unsigned(self.u8()?.into()),
            0x60 => Value::Unsigned(self.u16()?.into()),
            0x70 => Value::Unsigned(self.u32()?.into()),
            0x80 => Value::Unsigned(self.u64()?),
            0x51 | 0x54 | 0x55 => Value::Signed(self.number().map(i8::from_be_bytes)?.into()),
            0x61 => Value::Signed(self.number().map(i16::from_be_bytes)?.into()),
            0x71 => Value::Signed(self.number().map(i32::from_be_bytes)?.into()),
            0x81 => Value::Signed(self.number().map(i64::from_be_bytes)?),
            0x83 => Value::Timestamp(self.number().map(i64::from_be_bytes)?),
            0x98 => Value::Uuid(self.number()?),
            code @ (0xa0 | 0xa1 | 0xa3 | 0xb0 | 0xb1 | 0xb3) => {
                let length = if code < 0xb0 { usize::from(self.u8()?) } else { self.u32()? as usize };
                let bytes = self.take(length)?;
                match code & 0x0f {
                    0x0 => Value::Binary(bytes),
                    0x1 => Value::Text(bytes),
                    _ => Value::Symbol(bytes),
                }
            }
            0x45 => Value::List(List { count: 0, items: Reader(&[]) }),
            code @ (0xc0 | 0xc1 | 0xd0 | 0xd1) => {
                let mut inner = if code < 0xd0 {
                    let size = usize::from(self.u8()?);
                    Reader(self.take(size)?)
                } else {
                    let size = self.u32()? as usize;
                    Reader(self.take(size)?)
                };
                let count = if code < 0xd0 { inner.u8()?.into() } else { inner.u32()? };
                let list = List { count, items: inner };
                if code & 0x0f == 0 { Value::List(list) } else { Value::Map(list) }
            }
            code => {
                self.skip_behind(code)?;
                let whole = &before[..before.len() - self.0.len()];
                if code >> 4 >= 0xe { Value::Array(whole) } else { Value::Other }
            }
        };
        Ok(value)
    }

    fn value_of_descriptor(&mut self) -> Result<Value<'b>, String> {
        match self.0.first() {
            Some(0x00) => Err("a descriptor is described itself".to_owned()),
            _ => self.value(),
        }
    }
}

impl<'b> List<'b> {
    /// The next item; null behind the end, as the protocol has it.
    pub fn next(&mut self) -> Result<Value<'b>, String> {
        if self.count == 0 {
            return Ok(Value::Null);
        }
        self.count -= 1;
        self.items.value()
    }

    /// Passes over so many.
    pub fn pass(&mut self, items: usize) -> Result<(), String> {
        for _ in 0..items {
            self.next()?;
        }
        Ok(())
    }

    /// Name and value of a map; none at its end.
    pub fn pair(&mut self) -> Result<Option<(Value<'b>, Value<'b>)>, String> {
        if self.count < 2 {
            return Ok(None);
        }
        Ok(Some((self.next()?, self.next()?)))
    }
}

impl<'b> Value<'b> {
    pub fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }

    pub fn unsigned(self) -> Option<u64> {
        match self {
            Self::Unsigned(value) => Some(value),
            _ => None,
        }
    }

    pub fn u32(self) -> Option<u32> {
        self.unsigned().and_then(|value| value.try_into().ok())
    }

    pub fn bool(self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// A text or a symbol, whatever its bytes.
    pub fn text(self) -> Option<String> {
        match self {
            Self::Text(bytes) | Self::Symbol(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        }
    }

    /// What is described by this number, as a list.
    pub fn composite(self) -> Option<(u64, List<'b>)> {
        let Self::Described(Descriptor::Number(number), bytes) = self else { return None };
        match Reader(bytes).value() {
            Ok(Value::List(list)) => Some((number, list)),
            _ => None,
        }
    }

    /// The symbols of an array, or the one that stands alone. <https://docs.oasis-open.org/amqp/core/v1.0/os/amqp-core-types-v1.0-os.html#type-array>
    pub fn symbols(self) -> Vec<String> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match self {
            Self::Symbol(bytes) => vec![text(bytes)],
            Self::Array(bytes) => {
                let mut found = Vec::new();
                let mut reader = Reader(bytes);
                let mut read = || -> Result<(), String> {
                    let wide = reader.u8()? >= 0xf0;
                    let number = |reader: &mut Reader<'_>| match wide {
                        true => reader.u32().map(|number| number as usize),
                        false => reader.u8().map(usize::from),
                    };
                    number(&mut reader)?;
                    let count = number(&mut reader)?;
                    let code = reader.u8()?;
                    for _ in 0..count {
                        let length = match code {
                            0xa3 => usize::from(reader.u8()?),
                            0xb3 => reader.u32()? as usize,
                            _ => return Ok(()),
                        };
                        found.push(text(reader.take(length)?));
                    }
                    Ok(())
                };
                let _ = read();
                found
            }
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(field: Field<'_>) -> BytesMut {
        let mut into = BytesMut::new();
        put(&mut into, field);
        into
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        let long = "x".repeat(300);
        for text in ["", "ä", long.as_str()] {
            assert_eq!(Reader(&written(Field::Text(text))).value().unwrap().text().unwrap(), text);
            assert!(matches!(Reader(&written(Field::Symbol(text))).value(), Ok(Value::Symbol(_))));
            assert!(matches!(Reader(&written(Field::Binary(text.as_bytes()))).value(), Ok(Value::Binary(_))));
        }
        for number in [0, 1, 255, 256, u64::MAX] {
            assert_eq!(Reader(&written(Field::Ulong(number))).value().unwrap().unsigned(), Some(number));
        }
        for number in [0, 1, u32::MAX] {
            assert_eq!(Reader(&written(Field::Uint(number))).value().unwrap().u32(), Some(number));
        }
        assert!(matches!(Reader(&written(Field::Long(-7))).value(), Ok(Value::Signed(-7))));
        assert!(matches!(Reader(&written(Field::Timestamp(-7))).value(), Ok(Value::Timestamp(-7))));
        let pairs = [(Field::Symbol("a"), Field::Ushort(7)), (Field::Text("b"), Field::Bool(true))];
        let composite = written(Field::Composite(0x24, &[Field::Null, Field::Map(&pairs)]));
        let (descriptor, mut list) = Reader(&composite).value().unwrap().composite().unwrap();
        assert_eq!((descriptor, list.count), (0x24, 2));
        assert!(list.next().unwrap().is_null());
        let Value::Map(mut map) = list.next().unwrap() else { panic!("a map") };
        let (name, value) = map.pair().unwrap().unwrap();
        assert_eq!((name.text().unwrap().as_str(), value.unsigned()), ("a", Some(7)));
        assert_eq!(map.pair().unwrap().unwrap().1.bool(), Some(true));
        assert!(map.pair().unwrap().is_none() && list.next().unwrap().is_null());
    }

    #[test]
    fn symbols_come_alone_or_in_an_array() {
        let array =
            [0xe0, 17, 2, 0xa3, 5, b'P', b'L', b'A', b'I', b'N', 8, b'E', b'X', b'T', b'E', b'R', b'N', b'A', b'L'];
        assert_eq!(Reader(&array).value().unwrap().symbols(), ["PLAIN", "EXTERNAL"]);
        assert_eq!(Reader(&written(Field::Symbol("PLAIN"))).value().unwrap().symbols(), ["PLAIN"]);
        let several = written(Field::Symbols(&["PLAIN", "", "x"]));
        assert_eq!(Reader(&several).value().unwrap().symbols(), ["PLAIN", "", "x"]);
    }

    /// Other clients end by a stack overflow here.
    #[test]
    fn what_is_nested_deeply_is_passed_over_or_refused() {
        let mut nested = vec![0x45];
        for _ in 0..20_000 {
            let mut outer = vec![0xd0];
            outer.extend((nested.len() as u32 + 4).to_be_bytes());
            outer.extend(1_u32.to_be_bytes());
            outer.extend(&nested);
            nested = outer;
        }
        assert!(matches!(Reader(&nested).value(), Ok(Value::List(_))));
        assert!(Reader(&[0; 100_000]).value().is_err());
        let described: Vec<u8> = [0x00, 0x53, 0x01].repeat(30_000);
        assert!(Reader(&described).value().is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut reader = Reader(&bytes);
            while !reader.is_empty() && let Ok(value) = reader.value() {
                let _ = (value.symbols(), value.text());
                if let Value::List(mut list) | Value::Map(mut list) = value {
                    for _ in 0..200 {
                        if list.next().is_err() {
                            break;
                        }
                    }
                }
            }
        }
    }
}
