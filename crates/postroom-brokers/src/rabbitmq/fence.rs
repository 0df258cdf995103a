//! Pure: a filter over the bytes that a broker sends, in front of the client library, which does not survive all of them.
//!
//! The library recurses into nested tables until the stack overflows, which ends the process, and gives up the connection over
//! a short string that is not UTF-8, so that one message blocks its queue for ever. The fence hands on what the library can
//! read, byte for byte. A message whose properties it cannot read gets properties that it can, with the reason in a header; a
//! name that is not UTF-8 gets U+FFFD in its place; anything else ends the connection with words. Bodies are never changed.

use super::content_header;
use super::wire::{Flaw, Reader, check_table, lossy_short, put_short};

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;
const FRAME_END: u8 = 0xce;
/// Type, channel and size, which stand before a frame's payload.
const FRAME_HEAD: usize = 7;
/// What a frame has around its payload.
const FRAME_AROUND: usize = FRAME_HEAD + 1;
/// "AMQP", 0 and a version: how a broker answers that speaks another version.
const PROTOCOL_HEADER: usize = 8;

/// Smallest frame size that AMQP allows to negotiate.
pub(super) const FRAME_MAX_MIN: u32 = 4096;
/// What we offer, which is RabbitMQ's own default.
pub(super) const FRAME_MAX_DEFAULT: u32 = 131_072;
/// Largest that a URL may ask for: the client library allocates 64 of them for each connection.
pub(super) const FRAME_MAX_MAX: u32 = 1_048_576;

/// The broker sent what cannot be handed on; the connection must end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the broker sent {what}; check that the URL leads to a RabbitMQ, and what stands between")]
pub(super) struct Refusal {
    what: String,
}

fn refuse<T>(what: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { what: what.into() })
}

/// What the broker's bytes of one connection pass through, in their order.
pub(super) struct Fence {
    frame_max: u32,
    /// A frame, or a head, that has not come whole; never longer than a frame.
    partial: Vec<u8>,
    /// What is still to come of a body frame, its end included.
    body: usize,
}

/// One argument of a method.
enum Argument {
    Fixed(usize),
    Short,
    Long,
    Table,
}

/// The arguments of a method that a broker sends; none for any other: the client library would read those too.
fn arguments(class: u16, method: u16) -> Option<&'static [Argument]> {
    use Argument::{Fixed, Long, Short, Table};
    Some(match (class, method) {
        // basic: ack, nack, deliver first, for they are nearly all that comes.
        (60, 80 | 120) => &[Fixed(9)],
        (60, 60) => &[Short, Fixed(9), Short, Short],
        (60, 11 | 111) => &[],
        (60, 21 | 31 | 72) => &[Short],
        (60, 30) => &[Short, Fixed(1)],
        (60, 50) => &[Fixed(2), Short, Short, Short],
        (60, 71) => &[Fixed(9), Short, Short, Fixed(4)],
        // connection: start, secure, tune, open-ok, close, close-ok, blocked, unblocked, update-secret-ok.
        (10, 10) => &[Fixed(2), Table, Long, Long],
        (10, 20) => &[Long],
        (10, 30) => &[Fixed(8)],
        (10, 41 | 60) => &[Short],
        (10, 50) | (20, 40) => &[Fixed(2), Short, Fixed(4)],
        (10, 51 | 61 | 71) => &[],
        // channel: open-ok, flow, flow-ok, close (above), close-ok.
        (20, 11) => &[Long],
        (20, 20 | 21) => &[Fixed(1)],
        (20, 41) => &[],
        // access, exchange, queue, confirm, tx: the answers.
        (30, 11) => &[Fixed(2)],
        (40, 11 | 21 | 31 | 51) => &[],
        (50, 11) => &[Short, Fixed(8)],
        (50, 21 | 51) => &[],
        (50, 31 | 41) => &[Fixed(4)],
        (85, 11) | (90, 11 | 21 | 31) => &[],
        _ => return None,
    })
}

impl Fence {
    /// A fence for a new connection on which no frame is larger than `frame_max`.
    pub(super) fn new(frame_max: u32) -> Self {
        Self { frame_max: frame_max.clamp(FRAME_MAX_MIN, FRAME_MAX_MAX), partial: Vec::new(), body: 0 }
    }

    /// Takes in bytes of the broker and appends what is to be handed on. After a refusal nothing more may be fed; what was
    /// appended before it is right.
    pub(super) fn feed(&mut self, mut input: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        while !input.is_empty() {
            if self.body > 0 {
                let (passing, rest) = input.split_at(self.body.min(input.len()));
                self.body -= passing.len();
                if self.body == 0 && passing.last() != Some(&FRAME_END) {
                    return refuse("a body frame that does not end where it should");
                }
                out.extend_from_slice(passing);
                input = rest;
            } else if self.partial.is_empty() {
                input = match self.frame_length(input)? {
                    Some(whole) if whole <= input.len() => {
                        let (frame, rest) = input.split_at(whole);
                        self.hand_on(frame, out)?;
                        rest
                    }
                    _ => {
                        self.partial.extend_from_slice(input);
                        &[]
                    }
                };
            } else {
                // Only as much as the head, or the rest of the frame, still needs.
                let needed = self.frame_length(&self.partial)?.unwrap_or(FRAME_HEAD);
                let (more, rest) = input.split_at(needed.saturating_sub(self.partial.len()).min(input.len()));
                self.partial.extend_from_slice(more);
                input = rest;
                if self.frame_length(&self.partial)? == Some(self.partial.len()) {
                    let frame = std::mem::take(&mut self.partial);
                    self.hand_on(&frame, out)?;
                    // Its memory is used again.
                    self.partial = frame;
                    self.partial.clear();
                }
            }
        }
        Ok(())
    }

    /// How many bytes from here on are to be had together: the frame, or the head alone of a body frame. None where the head
    /// is not there yet.
    fn frame_length(&self, bytes: &[u8]) -> Result<Option<usize>, Refusal> {
        let mut reader = Reader(bytes);
        let Some(kind) = reader.u8() else { return Ok(None) };
        if kind == b'A' {
            return Ok(Some(PROTOCOL_HEADER));
        }
        if !matches!(kind, METHOD | HEADER | BODY | HEARTBEAT) {
            return refuse(format!("bytes that are no AMQP frame (type {kind})"));
        }
        let (Some(_), Some(size)) = (reader.u16(), reader.u32()) else { return Ok(None) };
        let whole = u64::from(size) + FRAME_AROUND as u64;
        if whole > u64::from(self.frame_max) {
            return refuse(format!("a frame of {whole} bytes, and the limit is {}", self.frame_max));
        }
        // Less than `frame_max` by now.
        Ok(Some(if kind == BODY { FRAME_HEAD } else { whole as usize }))
    }

    fn hand_on(&mut self, frame: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        let mut reader = Reader(frame);
        let (Some(kind), Some(channel), Some(size)) = (reader.u8(), reader.u16(), reader.u32()) else {
            return refuse("a frame without a head");
        };
        if kind == b'A' {
            if !frame.starts_with(b"AMQP\0") {
                return refuse("bytes that are no AMQP frame");
            }
            out.extend_from_slice(frame);
            return Ok(());
        }
        if kind == BODY {
            self.body = size as usize + 1;
            out.extend_from_slice(frame);
            return Ok(());
        }
        let Some((&FRAME_END, payload)) = reader.0.split_last() else {
            return refuse("a frame that does not end where it should");
        };
        let instead = match kind {
            METHOD => self.method(payload)?,
            HEADER if !content_header::is_readable(payload) && !cfg!(seeded_bug = "unreadable_properties_pass") => {
                let bytes_max = self.frame_max as usize - FRAME_AROUND;
                match content_header::readable(payload, bytes_max) {
                    Some(instead) => Some(instead),
                    None => return refuse("a message without the size of its body"),
                }
            }
            _ => None,
        };
        match instead {
            None => out.extend_from_slice(frame),
            Some(payload) => {
                out.push(kind);
                out.extend(channel.to_be_bytes());
                // Within the frame size, which is checked by who made it.
                out.extend((payload.len() as u32).to_be_bytes());
                out.extend(payload);
                out.push(FRAME_END);
            }
        }
        Ok(())
    }

    /// What to hand on instead of a method, if not the method itself.
    fn method(&self, payload: &[u8]) -> Result<Option<Vec<u8>>, Refusal> {
        let mut reader = Reader(payload);
        let (Some(class), Some(method)) = (reader.u16(), reader.u16()) else {
            return refuse("a method frame without a method");
        };
        let Some(arguments) = arguments(class, method) else {
            return refuse(format!("the method {class}.{method}, which no broker sends"));
        };
        if (class, method) == (10, 30) {
            return self.tune(payload);
        }
        let mut utf8 = true;
        let told = |flaw: Flaw| {
            let name = if (class, method) == (10, 10) { "connection.start" } else { "a method" };
            Refusal { what: format!("{name} ({class}.{method}) with {flaw}") }
        };
        for argument in arguments {
            let there = match argument {
                Argument::Fixed(bytes) => reader.take(*bytes),
                Argument::Long => reader.long(),
                Argument::Short => {
                    let text = reader.short();
                    utf8 &= text.is_none_or(|text| std::str::from_utf8(text).is_ok());
                    text
                }
                Argument::Table => {
                    let table = reader.long();
                    check_table(table.unwrap_or_default()).map_err(told)?;
                    table
                }
            };
            if there.is_none() {
                return Err(told(Flaw::LengthsWrong));
            }
        }
        if !reader.is_empty() {
            return Err(told(Flaw::LengthsWrong));
        }
        Ok((!utf8).then(|| with_lossy_names(payload, arguments)))
    }

    /// `connection.tune` with a frame size of 0 means no limit, for which the client library allocates 32 times 4 GiB.
    fn tune(&self, payload: &[u8]) -> Result<Option<Vec<u8>>, Refusal> {
        let Ok([_, _, _, _, channels_1, channels_2, size @ .., heartbeat_1, heartbeat_2]) = <[u8; 12]>::try_from(payload)
        else {
            return refuse("a connection.tune whose lengths do not add up");
        };
        let frame_max = u32::from_be_bytes(size);
        if (1..=self.frame_max).contains(&frame_max) {
            return Ok(None);
        }
        let mut tune = vec![0, 10, 0, 30, channels_1, channels_2];
        tune.extend(self.frame_max.to_be_bytes());
        tune.extend([heartbeat_1, heartbeat_2]);
        Ok(Some(tune))
    }
}

/// The method with U+FFFD for what is not UTF-8 in its names. Its lengths have been checked.
fn with_lossy_names(payload: &[u8], arguments: &[Argument]) -> Vec<u8> {
    let mut reader = Reader(payload);
    let mut method = reader.take(4).unwrap_or_default().to_vec();
    for argument in arguments {
        let from = reader.0;
        match argument {
            Argument::Short => {
                put_short(&mut method, lossy_short(reader.short().unwrap_or_default()).as_bytes());
                continue;
            }
            Argument::Fixed(bytes) => reader.take(*bytes),
            Argument::Long | Argument::Table => reader.long(),
        };
        method.extend(from.get(..from.len() - reader.0.len()).unwrap_or_default());
    }
    method
}
