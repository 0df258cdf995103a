//! Pure: a filter over the bytes that a broker sends, in front of the client library, which does not survive all of them.
//!
//! The library recurses into nested tables until the stack overflows, which ends the process, and gives up the connection over
//! a short string that is not UTF-8, so that one message blocks its queue for ever. The fence hands on what the library can
//! read, byte for byte. A message whose properties it cannot read gets properties that it can, with the reason in a header; a
//! name that is not UTF-8 gets U+FFFD in its place; anything else ends the connection with words. Bodies are never changed.

use super::content_header;
use super::unsettled::Unsettled;
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
/// Largest that a URL may ask for: the client library allocates 64 times as much for each connection.
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
    /// What was received and not answered, where that is limited.
    unsettled: Option<Unsettled>,
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
        let frame_max = frame_max.clamp(FRAME_MAX_MIN, FRAME_MAX_MAX);
        Self { frame_max, partial: Vec::new(), body: 0, unsettled: None }
    }

    /// Counts the bytes of messages that are received and not answered, and is full when there are this many.
    pub(super) fn limited_to(mut self, bytes: u64) -> Self {
        self.unsettled = Some(Unsettled::new(bytes));
        self
    }

    /// Nothing more should be fed for now.
    pub(super) fn is_full(&self) -> bool {
        let at_a_frame = self.partial.is_empty() && self.body == 0;
        at_a_frame && self.unsettled.as_ref().is_some_and(Unsettled::is_full)
    }

    /// This end has sent these bytes. True: it was full, and is no more.
    pub(super) fn sent(&mut self, bytes: &[u8]) -> bool {
        let was_full = self.is_full();
        let answered = self.unsettled.as_mut().is_some_and(|unsettled| unsettled.sent(bytes));
        answered && was_full && !self.is_full()
    }

    /// Takes in bytes of the broker and appends what is to be handed on; returns how many it took, which is all unless it is full.
    /// After a refusal nothing more may be fed; what was appended before it is right.
    pub(super) fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<usize, Refusal> {
        let mut input = bytes;
        while !input.is_empty() && !self.is_full() {
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
        Ok(bytes.len() - input.len())
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
            if let Some(unsettled) = &mut self.unsettled {
                unsettled.body_came(channel, size.into());
            }
            out.extend_from_slice(frame);
            return Ok(());
        }
        let Some((&FRAME_END, payload)) = reader.0.split_last() else {
            return refuse("a frame that does not end where it should");
        };
        if let Some(unsettled) = &mut self.unsettled {
            let mut arguments = Reader(payload);
            match kind {
                METHOD => {
                    if let (Some(class), Some(method)) = (arguments.u16(), arguments.u16()) {
                        unsettled.method_came(channel, class, method, arguments);
                    }
                }
                HEADER => unsettled.header_came(channel, payload),
                _ => {}
            }
        }
        let instead = match kind {
            METHOD => self.method(payload)?,
            HEADER if !content_header::is_readable(payload) => {
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
        let Ok([_, _, _, _, channels_1, channels_2, size @ .., heartbeat_1, heartbeat_2]) =
            <[u8; 12]>::try_from(payload)
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

#[cfg(test)]
mod tests {
    use lapin::protocol::parse_class;
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, channel: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![kind];
        frame.extend(channel.to_be_bytes());
        frame.extend((payload.len() as u32).to_be_bytes());
        frame.extend(payload);
        frame.push(FRAME_END);
        frame
    }

    /// What comes out of a new fence, or the refusal.
    fn passed(bytes: &[u8]) -> Result<Vec<u8>, String> {
        let mut out = Vec::new();
        Fence::new(FRAME_MAX_DEFAULT).feed(bytes, &mut out).map(|_| out).map_err(|refusal| refusal.to_string())
    }

    fn deliver(routing_key: &[u8]) -> Vec<u8> {
        let mut method = b"\0\x3c\0\x3c\x04ctag\0\0\0\0\0\0\0\x07\0\x08exchange".to_vec();
        put_short(&mut method, routing_key);
        frame(METHOD, 1, &method)
    }

    fn start(table: &[u8]) -> Vec<u8> {
        let mut method = vec![0, 10, 0, 10, 0, 9];
        method.extend((table.len() as u32).to_be_bytes());
        method.extend(table);
        method.extend(b"\0\0\0\x05PLAIN\0\0\0\x05en_US");
        frame(METHOD, 0, &method)
    }

    fn tune(frame_max: u32) -> Vec<u8> {
        let size = frame_max.to_be_bytes();
        frame(METHOD, 0, &[&[0, 10, 0, 30, 7, 255], &size[..], &[0, 60]].concat())
    }

    /// One of each kind of frame that a broker sends, as it should be.
    fn traffic(body: &[u8]) -> Vec<u8> {
        let properties = b"\0\x3c\0\0\0\0\0\0\0\0\0\x05\xa0\0\x0atext/plain\0\0\0\x04\x01at\x01";
        let mut traffic = start(b"\x07productS\0\0\0\x08RabbitMQ");
        traffic.extend(tune(FRAME_MAX_DEFAULT));
        traffic.extend(frame(METHOD, 0, b"\0\x0a\0\x29\0"));
        traffic.extend(frame(HEARTBEAT, 0, b""));
        traffic.extend(frame(METHOD, 1, b"\0\x14\0\x0b\0\0\0\0"));
        traffic.extend(frame(METHOD, 1, b"\0\x3c\0\x50\0\0\0\0\0\0\0\x01\x01"));
        traffic.extend(deliver("schön".as_bytes()));
        traffic.extend(frame(HEADER, 1, properties));
        traffic.extend(frame(BODY, 1, body));
        traffic.extend(frame(METHOD, 0, b"\0\x0a\0\x3c\x03low"));
        traffic
    }

    #[test]
    fn names_that_are_not_utf8_get_replacements_and_right_lengths() {
        let out = passed(&deliver(b"a\xffb")).unwrap();
        assert_eq!(out, deliver("a\u{fffd}b".as_bytes()));
        let close = |text: &[u8]| {
            let mut method = vec![0, 10, 0, 50, 1, 64];
            put_short(&mut method, text);
            method.extend([0, 60, 0, 40]);
            frame(METHOD, 0, &method)
        };
        assert_eq!(passed(&close(b"\xc3(")).unwrap(), close("\u{fffd}(".as_bytes()));
    }

    #[test]
    fn a_frame_size_of_zero_or_above_ours_becomes_ours() {
        assert_eq!(passed(&tune(0)).unwrap(), tune(FRAME_MAX_DEFAULT));
        assert_eq!(passed(&tune(u32::MAX)).unwrap(), tune(FRAME_MAX_DEFAULT));
        assert_eq!(passed(&tune(8192)).unwrap(), tune(8192));
    }

    #[test]
    fn what_cannot_be_handed_on_is_refused_in_words() {
        let mut nested = Vec::new();
        for _ in 0..1000 {
            let mut outer = b"\x01aF".to_vec();
            outer.extend((nested.len() as u32).to_be_bytes());
            outer.extend(&nested);
            nested = outer;
        }
        let refused = |bytes: &[u8], words: &str| {
            let refusal = passed(bytes).unwrap_err();
            assert!(refusal.contains(words), "{refusal}");
        };
        refused(&start(&nested), "connection.start (10.10) with tables nested deeper than 16 levels");
        refused(&start(b"\x01\xfft\x01"), "not UTF-8");
        refused(&frame(METHOD, 0, &[0, 50, 0, 10]), "50.10, which no broker sends");
        refused(&frame(METHOD, 1, b"\0\x3c\0\x50\0"), "lengths that do not add up");
        refused(&frame(HEADER, 1, b"\0\x3c"), "without the size of its body");
        refused(b"HTTP/1.1 400 Bad Request\r\n", "no AMQP frame");
        refused(b"\x01\0\0\xff\xff\xff\xff", "the limit is 131072");
        let mut torn = frame(BODY, 1, b"hello");
        *torn.last_mut().unwrap() = 0;
        refused(&torn, "does not end where it should");
        assert_eq!(
            passed(b"AMQP\0\0\x09\x01").unwrap(),
            b"AMQP\0\0\x09\x01",
            "another version is the library's to tell"
        );
    }

    proptest! {
        #[test]
        fn what_is_right_passes_byte_for_byte_in_pieces_of_any_size(
            body in prop::collection::vec(any::<u8>(), 0..2000),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let traffic = traffic(&body);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(traffic.len())).collect();
            cuts.extend([0, traffic.len()]);
            cuts.sort_unstable();
            let mut fence = Fence::new(FRAME_MAX_DEFAULT);
            let mut out = Vec::new();
            for piece in cuts.windows(2) {
                fence.feed(&traffic[piece[0]..piece[1]], &mut out).unwrap();
            }
            prop_assert_eq!(out, traffic);
        }

        #[test]
        fn arbitrary_bytes_neither_panic_nor_take_memory_without_end(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..600), 1..20),
            right_before in any::<bool>(),
        ) {
            let mut fence = Fence::new(FRAME_MAX_MIN);
            let mut bytes = if right_before { traffic(b"hello") } else { Vec::new() };
            for piece in pieces {
                bytes.extend(&piece);
                let mut out = Vec::new();
                let refused = fence.feed(&bytes, &mut out).is_err();
                let frame_max = FRAME_MAX_MIN as usize;
                prop_assert!(fence.partial.len() <= frame_max && out.len() <= 3 * (bytes.len() + frame_max));
                if refused {
                    break;
                }
                bytes.clear();
            }
        }

        #[test]
        fn the_client_library_reads_every_method_that_is_handed_on(
            class in prop::sample::select(vec![10u16, 20, 30, 40, 50, 60, 85, 90]),
            method in 0u16..130,
            mut rest in prop::collection::vec(prop_oneof![3 => 0u8..4, 1 => any::<u8>()], 0..40),
        ) {
            let mut payload = [class.to_be_bytes(), method.to_be_bytes()].concat();
            payload.append(&mut rest);
            if let Ok(out) = passed(&frame(METHOD, 1, &payload)) {
                let handed_on = &out[FRAME_HEAD..out.len() - 1];
                prop_assert!(parse_class(handed_on).is_ok_and(|(rest, _)| rest.is_empty()), "{handed_on:?}");
            }
        }
    }
}
