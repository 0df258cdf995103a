//! Pure: frames of AMQP 1.0 and of its login, as far as a client needs them.
//! <https://docs.oasis-open.org/amqp/core/v1.0/os/amqp-core-transport-v1.0-os.html>

use bytes::{BufMut, Bytes, BytesMut};

use super::types::{Field, List, Reader, Value, put_composite};

/// The largest frame that is sent to us.
pub(super) const FRAME_BYTES_MAX: u32 = 256 << 10;
/// What a client may send before a server has said more.
pub(super) const FRAME_BYTES_MIN: u32 = 512;
/// Size, offset of the body, type and channel.
const HEAD: usize = 8;

pub(super) const OPEN: u64 = 0x10;
pub(super) const BEGIN: u64 = 0x11;
pub(super) const ATTACH: u64 = 0x12;
pub(super) const FLOW: u64 = 0x13;
pub(super) const TRANSFER: u64 = 0x14;
pub(super) const DISPOSITION: u64 = 0x15;
const DETACH: u64 = 0x16;
const END: u64 = 0x17;
pub(super) const CLOSE: u64 = 0x18;
pub(super) const ERROR: u64 = 0x1d;
pub(super) const ACCEPTED: u64 = 0x24;
pub(super) const REJECTED: u64 = 0x25;
pub(super) const RELEASED: u64 = 0x26;
const MODIFIED: u64 = 0x27;
pub(super) const SOURCE: u64 = 0x28;
pub(super) const TARGET: u64 = 0x29;
const MECHANISMS: u64 = 0x40;
pub(super) const INIT: u64 = 0x41;
const OUTCOME: u64 = 0x44;

/// What a frame belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layer {
    Amqp = 0,
    Sasl = 1,
}

/// A server's reason, with what it added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    /// Such as `amqp:not-found`.
    pub condition: String,
    pub description: Option<String>,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.description {
            Some(description) => write!(f, "{}: {description}", self.condition),
            None => f.write_str(&self.condition),
        }
    }
}

/// What a server says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Product {
    pub name: Option<String>,
    pub version: Option<String>,
}

/// What became of a delivery at its receiver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Accepted,
    Rejected(Option<Fault>),
    Released,
    Modified {
        undeliverable: bool,
    },
    /// It is not the end of it, or nothing that is understood.
    None,
}

/// How a sender or a receiver stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Flow {
    pub next_incoming_id: Option<u32>,
    pub incoming_window: u32,
    pub next_outgoing_id: u32,
    pub link: Option<LinkFlow>,
    pub echo: bool,
}

/// How one link stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LinkFlow {
    pub handle: u32,
    pub delivery_count: u32,
    pub credit: u32,
    /// What is not used of the credit is to be gone.
    pub drain: bool,
}

/// A part of a message, or all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Transfer {
    pub handle: u32,
    pub delivery_id: Option<u32>,
    pub delivery_tag: Vec<u8>,
    pub settled: bool,
    pub more: bool,
    pub aborted: bool,
    pub payload: Bytes,
}

/// A frame from the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    Mechanisms(Vec<String>),
    /// The code; 0 is success.
    LoginOutcome(u8),
    Open {
        frame_bytes_max: u32,
        idle_ms: u32,
        product: Product,
    },
    Begin {
        next_outgoing_id: u32,
        incoming_window: u32,
    },
    /// `refused`: an end of it is missing, and why comes with a detach.
    Attach {
        handle: u32,
        refused: bool,
        /// It settles what it sends before anybody has it.
        sends_settled: bool,
        /// It sends copies, and keeps no message for one receiver.
        sends_copies: bool,
        delivery_count: u32,
        message_bytes_max: Option<u64>,
    },
    Flow(Flow),
    Transfer(Transfer),
    /// What happened to some of the deliveries that we sent.
    Disposition {
        first: u32,
        last: u32,
        settled: bool,
        outcome: Outcome,
    },
    Detach(u32, Option<Fault>),
    End(Option<Fault>),
    Close(Option<Fault>),
    /// It is there.
    Empty,
    /// Nothing that a client waits for.
    Other,
}

/// Writes a frame with one performative, and `payload` behind it.
pub(super) fn put(into: &mut BytesMut, layer: Layer, descriptor: u64, fields: &[Field<'_>], payload: &[u8]) {
    let at = into.len();
    into.put_slice(&[0, 0, 0, 0, 2, layer as u8, 0, 0]);
    put_composite(into, descriptor, fields);
    into.put_slice(payload);
    let size = (into.len() - at) as u32;
    into[at..at + 4].copy_from_slice(&size.to_be_bytes());
}

/// That we are there.
pub(super) fn put_empty(into: &mut BytesMut) {
    into.put_slice(&[0, 0, 0, HEAD as u8, 2, 0, 0, 0]);
}

/// Takes the next frame out of what was read; none: it has not come whole.
pub(super) fn next(read: &mut BytesMut, layer: Layer) -> Result<Option<Frame>, String> {
    let Some(head) = read.first_chunk::<HEAD>() else { return Ok(None) };
    let size = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
    if head.starts_with(b"AMQP") {
        return Err("it speaks another version of AMQP, or asks for a login again".to_owned());
    }
    let offset = usize::from(head[4]) * 4;
    if (size as usize) < offset || offset < HEAD || size > FRAME_BYTES_MAX {
        return Err(format!("it sends a frame of {size} bytes, and {FRAME_BYTES_MAX} were agreed"));
    }
    if head[5] != layer as u8 {
        return Err(format!("it sends a frame of type {} in the wrong place", head[5]));
    }
    if read.len() < size as usize {
        return Ok(None);
    }
    let body = read.split_to(size as usize).freeze().slice(offset..);
    if body.is_empty() {
        return Ok(Some(Frame::Empty));
    }
    frame(&body).map(Some).map_err(|problem| format!("its frame cannot be read: {problem}"))
}

fn frame(body: &Bytes) -> Result<Frame, String> {
    let mut reader = Reader(body);
    let Some((descriptor, mut fields)) = reader.value()?.composite() else {
        return Err("it has no performative that is a list with a number".to_owned());
    };
    let payload = body.slice(body.len() - reader.0.len()..);
    let list = &mut fields;
    let frame = match descriptor {
        MECHANISMS => Frame::Mechanisms(list.next()?.symbols()),
        OUTCOME => {
            Frame::LoginOutcome(list.next()?.unsigned().and_then(|code| code.try_into().ok()).unwrap_or(u8::MAX))
        }
        OPEN => {
            list.pass(2)?;
            let frame_bytes_max = list.next()?.u32().unwrap_or(u32::MAX);
            list.pass(1)?;
            let idle_ms = list.next()?.u32().unwrap_or(0);
            list.pass(4)?;
            Frame::Open { frame_bytes_max, idle_ms, product: product(list.next()?)? }
        }
        BEGIN => {
            list.pass(1)?;
            Frame::Begin { next_outgoing_id: number(list)?, incoming_window: number(list)? }
        }
        ATTACH => {
            list.pass(1)?;
            let handle = number(list)?;
            // Whether the server is the receiver.
            let receives = list.next()?.bool().unwrap_or(false);
            let sends_settled = list.next()?.unsigned() == Some(1) && !receives;
            list.pass(1)?;
            let (source, target) = (list.next()?, list.next()?);
            let sends_copies = !receives && distribution(source)?.as_deref() == Some("copy");
            list.pass(2)?;
            let delivery_count = list.next()?.u32().unwrap_or(0);
            let message_bytes_max = list.next()?.unsigned().filter(|bytes| *bytes > 0);
            let refused = if receives { target.is_null() } else { source.is_null() };
            Frame::Attach { handle, refused, sends_settled, sends_copies, delivery_count, message_bytes_max }
        }
        FLOW => {
            let next_incoming_id = list.next()?.u32();
            let (incoming_window, next_outgoing_id) = (number(list)?, number(list)?);
            list.pass(1)?;
            let (handle, count, credit) = (list.next()?.u32(), list.next()?.u32(), list.next()?.u32());
            list.pass(1)?;
            let (drain, echo) = (list.next()?.bool().unwrap_or(false), list.next()?.bool().unwrap_or(false));
            let (delivery_count, credit) = (count.unwrap_or(0), credit.unwrap_or(0));
            let link = handle.map(|handle| LinkFlow { handle, delivery_count, credit, drain });
            Frame::Flow(Flow { next_incoming_id, incoming_window, next_outgoing_id, link, echo })
        }
        TRANSFER => {
            let handle = number(list)?;
            let delivery_id = list.next()?.u32();
            let delivery_tag = match list.next()? {
                Value::Binary(tag) => tag.to_vec(),
                _ => Vec::new(),
            };
            list.pass(1)?;
            let settled = list.next()?.bool().unwrap_or(false);
            let more = list.next()?.bool().unwrap_or(false);
            list.pass(3)?;
            let aborted = list.next()?.bool().unwrap_or(false);
            Frame::Transfer(Transfer { handle, delivery_id, delivery_tag, settled, more, aborted, payload })
        }
        DISPOSITION => {
            // Whether it speaks as the receiver.
            if !list.next()?.bool().unwrap_or(false) {
                return Ok(Frame::Other);
            }
            let first = number(list)?;
            let last = list.next()?.u32().unwrap_or(first);
            let settled = list.next()?.bool().unwrap_or(false);
            Frame::Disposition { first, last, settled, outcome: outcome(list.next()?)? }
        }
        DETACH => {
            let handle = number(list)?;
            list.pass(1)?;
            Frame::Detach(handle, fault(list.next()?)?)
        }
        END => Frame::End(fault(list.next()?)?),
        CLOSE => Frame::Close(fault(list.next()?)?),
        _ => Frame::Other,
    };
    Ok(frame)
}

/// How a source gives out messages: `move` or `copy`.
fn distribution(source: Value<'_>) -> Result<Option<String>, String> {
    let Some((SOURCE, mut list)) = source.composite() else { return Ok(None) };
    list.pass(6)?;
    Ok(list.next()?.text())
}

fn product(value: Value<'_>) -> Result<Product, String> {
    let mut product = Product::default();
    let Value::Map(mut map) = value else { return Ok(product) };
    while let Some((name, value)) = map.pair()? {
        match name.text().as_deref() {
            Some("product") => product.name = value.text(),
            Some("version") => product.version = value.text(),
            _ => {}
        }
    }
    Ok(product)
}

fn number(list: &mut List<'_>) -> Result<u32, String> {
    list.next()?.u32().ok_or_else(|| "a number is missing".to_owned())
}

fn fault(value: Value<'_>) -> Result<Option<Fault>, String> {
    let Some((ERROR, mut list)) = value.composite() else { return Ok(None) };
    let condition = list.next()?.text().unwrap_or_else(|| "an error without a condition".to_owned());
    Ok(Some(Fault { condition, description: list.next()?.text().filter(|text| !text.is_empty()) }))
}

fn outcome(value: Value<'_>) -> Result<Outcome, String> {
    let Some((descriptor, mut list)) = value.composite() else { return Ok(Outcome::None) };
    Ok(match descriptor {
        ACCEPTED => Outcome::Accepted,
        REJECTED => Outcome::Rejected(fault(list.next()?)?),
        RELEASED => Outcome::Released,
        MODIFIED => {
            list.pass(1)?;
            Outcome::Modified { undeliverable: list.next()?.bool().unwrap_or(false) }
        }
        // Received, for one: more is to come.
        _ => Outcome::None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn came(layer: Layer, descriptor: u64, fields: &[Field<'_>], payload: &[u8]) -> Frame {
        let mut bytes = BytesMut::new();
        put(&mut bytes, layer, descriptor, fields, payload);
        let mut partial = BytesMut::from(&bytes[..bytes.len() - 1]);
        assert_eq!(next(&mut partial, layer), Ok(None));
        let frame = next(&mut bytes, layer).unwrap().unwrap();
        assert!(bytes.is_empty());
        frame
    }

    #[test]
    fn frames_are_read_as_far_as_a_client_needs_them() {
        let uint = Field::Uint;
        let pairs = [(Field::Symbol("product"), Field::Text("Rabbit")), (Field::Symbol("version"), Field::Text("4.3"))];
        let (none, server) = (Field::Null, Field::Text("server"));
        let open =
            [server, none, uint(9000), Field::Ushort(7), uint(15_000), none, none, none, none, Field::Map(&pairs)];
        let product = Product { name: Some("Rabbit".to_owned()), version: Some("4.3".to_owned()) };
        let frame = came(Layer::Amqp, OPEN, &open, b"");
        assert_eq!(frame, Frame::Open { frame_bytes_max: 9000, idle_ms: 15_000, product });
        let of_few = Frame::Open { frame_bytes_max: u32::MAX, idle_ms: 0, product: Product::default() };
        assert_eq!(came(Layer::Amqp, OPEN, &open[..1], b""), of_few);
        let transfer = [uint(1), uint(5), Field::Binary(b"t"), uint(0), Field::Null, Field::Bool(true)];
        let Frame::Transfer(transfer) = came(Layer::Amqp, TRANSFER, &transfer, b"body") else { panic!("a transfer") };
        assert_eq!((transfer.delivery_id, transfer.more, transfer.settled), (Some(5), true, false));
        assert_eq!((transfer.delivery_tag.as_slice(), &transfer.payload[..]), (&b"t"[..], &b"body"[..]));
        let fault = Field::Composite(ERROR, &[Field::Symbol("amqp:not-found"), Field::Text("no queue")]);
        let Frame::Detach(3, Some(told)) = came(Layer::Amqp, DETACH, &[uint(3), Field::Bool(true), fault], b"") else {
            panic!("a detach")
        };
        assert_eq!(told.to_string(), "amqp:not-found: no queue");
        let rejected = Field::Composite(REJECTED, &[fault]);
        let disposition = [Field::Bool(true), uint(7), Field::Null, Field::Bool(true), rejected];
        let Frame::Disposition { first: 7, last: 7, settled: true, outcome: Outcome::Rejected(Some(_)) } =
            came(Layer::Amqp, DISPOSITION, &disposition, b"")
        else {
            panic!("a disposition")
        };
        let attach = [Field::Text("l"), uint(0), Field::Bool(true), Field::Null, Field::Null, Field::Null, Field::Null];
        let Frame::Attach { refused: true, .. } = came(Layer::Amqp, ATTACH, &attach, b"") else { panic!("refused") };
        assert_eq!(came(Layer::Sasl, OUTCOME, &[Field::Ubyte(1)], b""), Frame::LoginOutcome(1));
        let mut empty = BytesMut::new();
        put_empty(&mut empty);
        assert_eq!(next(&mut empty, Layer::Amqp), Ok(Some(Frame::Empty)));
    }

    #[test]
    fn what_is_no_frame_is_refused_before_anything_is_reserved_for_it() {
        for bytes in [
            &[0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0][..],
            &[0, 0, 0, 8, 1, 0, 0, 0],
            &[0, 0, 0, 8, 255, 0, 0, 0],
            &[0, 0, 0, 8, 2, 1, 0, 0],
            b"AMQP\0\x01\0\0",
            b"HTTP/1.1",
        ] {
            assert!(next(&mut BytesMut::from(bytes), Layer::Amqp).is_err(), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn no_frame_is_too_strange(descriptor in 0x10_u8..0x45, bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let mut whole = BytesMut::new();
            whole.put_u32(bytes.len() as u32 + 11);
            whole.put_slice(&[2, 0, 0, 0, 0, 0x53, descriptor]);
            whole.put_slice(&bytes);
            let _ = next(&mut whole, Layer::Amqp);
        }
    }
}
