//! Pure: how many bytes of messages a connection has received and not answered, by what passes in both directions. AMQP's own limit
//! counts messages; RabbitMQ implements none in bytes (`prefetch_size` of `basic.qos` must be 0 there).

use std::collections::{BTreeMap, HashMap};

use super::wire::Reader;

/// Memory that a message takes besides its body and properties.
const AROUND: u64 = 512;

/// Deliveries that were received and not answered.
#[derive(Debug)]
pub(super) struct Unsettled {
    max: u64,
    bytes: u64,
    /// By channel and delivery tag.
    deliveries: BTreeMap<(u16, u64), u64>,
    /// Tags of deliveries whose properties have not come yet, by channel.
    begun: HashMap<u16, u64>,
    /// Bytes of bodies that are still to come, by channel.
    coming: HashMap<u16, u64>,
    answers: Answers,
}

/// What this end sends, as far as it answers deliveries. Its frames are the client library's and well formed.
#[derive(Debug, Default)]
struct Answers {
    /// The beginning of a frame: type, channel, size and, of a method, its arguments as far as they matter.
    head: Vec<u8>,
    /// Bytes of the frame that are still to come and do not matter.
    rest: u64,
}

/// Type, channel and size.
const FRAME_HEAD: usize = 7;
/// Class, method, delivery tag and a bit.
const ANSWER: usize = 13;
const METHOD: u8 = 1;

impl Unsettled {
    /// At most this many bytes, or one message that is larger.
    pub fn new(max: u64) -> Self {
        let (deliveries, begun, coming) = (BTreeMap::new(), HashMap::new(), HashMap::new());
        Self { max, bytes: 0, deliveries, begun, coming, answers: Answers::default() }
    }

    /// Nothing more should be read for now. Never in the middle of a message, which could not be answered then.
    pub fn is_full(&self) -> bool {
        self.bytes >= self.max && self.begun.is_empty() && self.coming.is_empty()
    }

    /// A method came, without class and method in `arguments`.
    pub fn method_came(&mut self, channel: u16, class: u16, method: u16, mut arguments: Reader<'_>) {
        match (class, method) {
            (60, 60) => {
                let tag = arguments.u8().and_then(|length| arguments.take(length.into())).and_then(|_| arguments.u64());
                self.begun.extend(tag.map(|tag| (channel, tag)));
            }
            (20, 40 | 41) => self.channel_ended(channel),
            _ => {}
        }
    }

    /// The properties of a message came: class, weight, size of the body, and the rest.
    pub fn header_came(&mut self, channel: u16, payload: &[u8]) {
        let Some(tag) = self.begun.remove(&channel) else { return };
        let mut reader = Reader(payload);
        let body = reader.u32().and_then(|_| reader.u64()).unwrap_or_default();
        let bytes = body.saturating_add(payload.len() as u64).saturating_add(AROUND);
        self.deliveries.insert((channel, tag), bytes);
        self.bytes = self.bytes.saturating_add(bytes);
        if body > 0 {
            self.coming.insert(channel, body);
        }
    }

    /// A part of a body came.
    pub fn body_came(&mut self, channel: u16, bytes: u64) {
        if let Some(coming) = self.coming.get_mut(&channel) {
            *coming = coming.saturating_sub(bytes);
            if *coming == 0 {
                self.coming.remove(&channel);
            }
        }
    }

    /// This end has sent these bytes. True: something was answered.
    pub fn sent(&mut self, mut bytes: &[u8]) -> bool {
        let before = self.bytes;
        while !bytes.is_empty() {
            if self.answers.rest > 0 {
                let passing = (bytes.len() as u64).min(self.answers.rest);
                self.answers.rest -= passing;
                bytes = bytes.get(passing as usize..).unwrap_or_default();
                continue;
            }
            let (taken, rest) = bytes.split_at(self.answers.needs().min(bytes.len()));
            self.answers.head.extend_from_slice(taken);
            bytes = rest;
            if self.answers.needs() == 0 {
                let head = std::mem::take(&mut self.answers.head);
                self.answers.rest = Answers::length(&head).saturating_sub(head.len() as u64);
                self.frame_went(&head);
            }
        }
        self.bytes < before
    }

    fn frame_went(&mut self, head: &[u8]) {
        let mut reader = Reader(head);
        let (Some(METHOD), Some(channel), Some(_)) = (reader.u8(), reader.u16(), reader.u32()) else { return };
        let (Some(class), Some(method)) = (reader.u16(), reader.u16()) else { return };
        match (class, method) {
            // ack and nack, which may answer all up to a tag; reject.
            (60, 80 | 120) => {
                if let (Some(tag), Some(bits)) = (reader.u64(), reader.u8()) {
                    self.answered(channel, tag, bits & 1 == 1);
                }
            }
            (60, 90) => {
                if let Some(tag) = reader.u64() {
                    self.answered(channel, tag, false);
                }
            }
            (20, 40 | 41) => self.channel_ended(channel),
            _ => {}
        }
    }

    fn answered(&mut self, channel: u16, tag: u64, and_those_before: bool) {
        let last = if tag == 0 { u64::MAX } else { tag };
        let first = if and_those_before { 0 } else { last };
        let answered: Vec<(u16, u64)> =
            self.deliveries.range((channel, first)..=(channel, last)).map(|(delivery, _)| *delivery).collect();
        for delivery in answered {
            self.bytes = self.bytes.saturating_sub(self.deliveries.remove(&delivery).unwrap_or_default());
        }
    }

    fn channel_ended(&mut self, channel: u16) {
        self.answered(channel, 0, true);
        self.begun.remove(&channel);
        self.coming.remove(&channel);
    }
}

impl Answers {
    /// How many bytes more make the beginning of the frame complete.
    fn needs(&self) -> usize {
        let wanted = match self.head.first() {
            Some(&METHOD) if self.head.len() >= FRAME_HEAD => {
                Self::length(&self.head).min((FRAME_HEAD + ANSWER) as u64) as usize
            }
            // The client's greeting: "AMQP" and a version.
            Some(&b'A') => FRAME_HEAD + 1,
            _ => FRAME_HEAD,
        };
        wanted.saturating_sub(self.head.len())
    }

    /// The whole frame, with its end.
    fn length(head: &[u8]) -> u64 {
        let mut reader = Reader(head);
        match (reader.u8(), reader.u16(), reader.u32()) {
            (Some(b'A'), ..) => FRAME_HEAD as u64 + 1,
            (Some(_), Some(_), Some(size)) => FRAME_HEAD as u64 + u64::from(size) + 1,
            _ => FRAME_HEAD as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deliver(unsettled: &mut Unsettled, channel: u16, tag: u64, body: u64) {
        let mut arguments = vec![1, b'c'];
        arguments.extend(tag.to_be_bytes());
        unsettled.method_came(channel, 60, 60, Reader(&arguments));
        assert!(!unsettled.is_full(), "not in the middle of a message");
        let mut header = vec![0, 60, 0, 0];
        header.extend(body.to_be_bytes());
        unsettled.header_came(channel, &header);
        if body > 0 {
            assert!(!unsettled.is_full(), "not in the middle of a message");
            unsettled.body_came(channel, body - 1);
            assert!(!unsettled.is_full(), "not in the middle of a message");
            unsettled.body_came(channel, 1);
        }
    }

    fn frame(channel: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![METHOD];
        frame.extend(channel.to_be_bytes());
        frame.extend((payload.len() as u32).to_be_bytes());
        frame.extend(payload);
        frame.push(0xce);
        frame
    }

    fn answer(channel: u16, method: u8, tag: u64, bits: u8) -> Vec<u8> {
        let mut payload = vec![0, 60, 0, method];
        payload.extend(tag.to_be_bytes());
        payload.push(bits);
        frame(channel, &payload)
    }

    #[test]
    fn it_is_full_until_enough_was_answered_however_the_answers_are_cut() {
        for cut in 1..40 {
            let mut unsettled = Unsettled::new(11_000);
            for tag in 1..=10 {
                assert!(!unsettled.is_full());
                deliver(&mut unsettled, 1, tag, 600);
            }
            assert!(unsettled.is_full());
            // A greeting, a heartbeat, and a method with long arguments before it.
            let mut sent = b"AMQP\0\0\x09\x01".to_vec();
            sent.extend([8, 0, 0, 0, 0, 0, 0, 0xce]);
            sent.extend(frame(1, &[&[0, 60, 0, 20][..], &[7; 300]].concat()));
            sent.extend(answer(1, 80, 3, 0));
            sent.extend(answer(1, 90, 4, 1));
            assert_eq!(sent.chunks(cut).filter(|part| unsettled.sent(part)).count().min(1), 1);
            assert!(!unsettled.is_full());
            assert_eq!(unsettled.deliveries.len(), 8);
            // All up to the ninth.
            unsettled.sent(&answer(1, 120, 9, 0b11));
            assert_eq!(unsettled.deliveries.keys().collect::<Vec<_>>(), [&(1, 10)]);
            unsettled.sent(&answer(1, 80, 0, 1));
            assert_eq!((unsettled.bytes, unsettled.deliveries.len()), (0, 0));
        }
    }

    #[test]
    fn one_message_that_is_larger_is_let_in_and_a_channel_that_ends_leaves_nothing() {
        let mut unsettled = Unsettled::new(100);
        deliver(&mut unsettled, 1, 1, 5000);
        deliver(&mut unsettled, 2, 1, 0);
        assert!(unsettled.is_full());
        unsettled.method_came(1, 20, 40, Reader(&[]));
        assert!(unsettled.is_full(), "the other one still counts");
        assert!(unsettled.sent(&frame(2, &[0, 20, 0, 41])));
        assert_eq!(unsettled.bytes, 0);
        // What was on its way when its channel ended.
        unsettled.method_came(3, 60, 60, Reader(&[0, 0, 0, 0, 0, 0, 0, 0, 9]));
        unsettled.method_came(3, 20, 41, Reader(&[]));
        unsettled.header_came(3, &[0; 12]);
        assert_eq!((unsettled.bytes, unsettled.begun.len()), (0, 0));
    }
}
