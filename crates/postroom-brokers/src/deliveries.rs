//! Pure: what a subscription to a log has handed out, and how far each part of the log is settled. For brokers that know a reader's place
//! and not each message: the place may only go behind what has nothing open before it.

use std::collections::{BTreeSet, HashMap, VecDeque};

use postroom::{Answer, Arrival, Bound, Message, MessageId, Partition, Receipt, Received};

/// How far a part of a log is settled, from where a session began.
#[derive(Debug)]
pub(crate) struct Progress<P> {
    /// Handed out or waiting, and not settled.
    open: BTreeSet<P>,
    /// Behind the last one that was read.
    next: P,
    /// What the broker was told last.
    pub committed: P,
    /// The broker was told that what is before this one may have been handed out.
    pub reserved: P,
}

impl<P: Ord + Copy> Progress<P> {
    /// Begins at `place`, which the broker was told, together with `reserved`.
    pub fn from(place: P, reserved: P) -> Self {
        Self { open: BTreeSet::new(), next: place, committed: place, reserved }
    }

    /// The one at `place` was read; `next` is behind it.
    pub fn read(&mut self, place: P, next: P) {
        self.open.insert(place);
        self.next = self.next.max(next);
    }

    /// This one is settled.
    pub fn settled(&mut self, place: P) {
        self.open.remove(&place);
    }

    /// Behind the last one that was read.
    #[cfg(feature = "kafka")]
    pub fn next(&self) -> P {
        self.next
    }

    /// Everything before this one is settled.
    pub fn floor(&self) -> P {
        self.open.first().copied().unwrap_or(self.next)
    }
}

/// A message as it was taken from a part of a log.
pub(crate) struct Taken<P> {
    /// What [`Deliveries::begin`] called the part.
    pub partition: u32,
    pub place: P,
    /// Behind it.
    pub next: P,
    pub redelivered: bool,
    pub id: Option<MessageId>,
    pub message: Message,
}

/// What a message takes, as far as whoever sends it decides that.
fn bytes_of(message: &Message) -> u64 {
    let headers: usize = message.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    (message.payload.len() + headers) as u64
}

/// A delivery that is not settled.
struct Open<P> {
    partition: u32,
    place: P,
    received: Received,
}

/// What was delivered in one session and is not settled.
pub(crate) struct Deliveries<P> {
    session: u64,
    prefetch: usize,
    bytes_max: u64,
    queue: VecDeque<Received>,
    /// Parts that somebody else has now.
    revoked: VecDeque<Partition>,
    /// By the number of the delivery.
    unsettled: HashMap<u64, Open<P>>,
    partitions: HashMap<u32, Progress<P>>,
    bytes: u64,
    /// Numbers of deliveries and of parts.
    deliveries: u64,
    numbered: u32,
}

impl<P: Ord + Copy> Deliveries<P> {
    /// None yet. At most `prefetch` messages and `bytes_max` bytes are unsettled at a time, in which one message may be larger.
    pub fn new(session: u64, prefetch: u16, bytes_max: u64) -> Self {
        Self {
            session,
            prefetch: usize::from(prefetch),
            bytes_max,
            queue: VecDeque::new(),
            revoked: VecDeque::new(),
            unsettled: HashMap::new(),
            partitions: HashMap::new(),
            bytes: 0,
            deliveries: 0,
            numbered: 0,
        }
    }

    /// A part of the log begins at `place`; what it is called.
    pub fn begin(&mut self, place: P, reserved: P) -> u32 {
        self.numbered = self.numbered.wrapping_add(1);
        self.partitions.insert(self.numbered, Progress::from(place, reserved));
        self.numbered
    }

    /// How many messages there is room for.
    pub fn room(&self) -> usize {
        let has_room = self.bytes < self.bytes_max || self.unsettled.is_empty();
        if has_room { self.prefetch.saturating_sub(self.unsettled.len()) } else { 0 }
    }

    /// How many bytes there is room for.
    #[cfg(any(test, feature = "redis"))]
    pub fn bytes_room(&self) -> u64 {
        self.bytes_max.saturating_sub(self.bytes)
    }

    #[cfg(feature = "kafka")]
    pub fn progress(&self, partition: u32) -> Option<&Progress<P>> {
        self.partitions.get(&partition)
    }

    pub fn arrived(&mut self, taken: Taken<P>) {
        let Taken { partition, place, next, redelivered, id, message } = taken;
        let Some(progress) = self.partitions.get_mut(&partition) else { return };
        progress.read(place, next);
        self.bytes = self.bytes.saturating_add(bytes_of(&message));
        self.deliveries += 1;
        let receipt = Receipt::new(self.session, self.deliveries);
        let received = Received { receipt, partition: Partition(partition), redelivered, id, message };
        self.unsettled.insert(receipt.number(), Open { partition, place, received: received.clone() });
        self.queue.push_back(received);
    }

    /// The floor and the reservation of a part, where the broker has to be told.
    pub fn to_commit(&self, partition: u32, again: bool) -> Option<(P, P)> {
        let progress = self.partitions.get(&partition)?;
        let floor = progress.floor();
        (again || floor != progress.committed).then_some((floor, progress.reserved))
    }

    /// The broker was told.
    pub fn committed(&mut self, partition: u32, floor: P, reserved: Option<P>) {
        if let Some(progress) = self.partitions.get_mut(&partition) {
            progress.committed = floor;
            progress.reserved = reserved.unwrap_or(progress.reserved);
        }
    }

    /// Somebody else has this part now: nothing of it can be settled here any more.
    #[cfg(feature = "kafka")]
    pub fn revoke(&mut self, partition: u32) {
        self.partitions.remove(&partition);
        let queued = self.queue.len();
        self.queue.retain(|received| received.partition != Partition(partition));
        let dropped = queued - self.queue.len();
        let open = self.unsettled.len();
        self.unsettled.retain(|_, open| open.partition != partition);
        self.bytes = self.unsettled.values().map(|open| bytes_of(&open.received.message)).sum();
        if open - self.unsettled.len() > dropped {
            self.revoked.push_back(Partition(partition));
        }
    }

    /// Hands out what is there.
    pub fn take(&mut self, max: Bound) -> Option<Arrival> {
        if let Some(partition) = self.revoked.pop_front() {
            return Some(Arrival::Revoked(partition));
        }
        let (mut taken, mut bytes) = (Vec::new(), 0_usize);
        while let Some(next) = self.queue.front() {
            bytes = bytes.saturating_add(next.message.payload.len());
            if taken.len() >= max.messages.max(1) || (!taken.is_empty() && bytes > max.bytes) {
                break;
            }
            taken.extend(self.queue.pop_front());
        }
        (!taken.is_empty()).then_some(Arrival::Messages(taken))
    }

    /// Answers of other sessions, and second ones, settle nothing.
    pub fn settle(&mut self, answers: &[(Receipt, Answer)]) {
        let mut again = Vec::new();
        for (receipt, answer) in answers.iter().filter(|(receipt, _)| receipt.session() == self.session) {
            // One that was settled already, or whose part is somebody else's.
            let Some(open) = self.unsettled.remove(&receipt.number()) else { continue };
            if *answer == Answer::Requeue {
                again.push(open);
                continue;
            }
            self.bytes = self.bytes.saturating_sub(bytes_of(&open.received.message));
            if let Some(progress) = self.partitions.get_mut(&open.partition) {
                progress.settled(open.place);
            }
        }
        // Each before those that come behind it in its part.
        again.sort_unstable_by_key(|open| (open.partition, open.place));
        for mut open in again {
            self.deliveries += 1;
            let receipt = Receipt::new(self.session, self.deliveries);
            (open.received.receipt, open.received.redelivered) = (receipt, true);
            let is_behind = |received: &Received| {
                received.partition == open.received.partition
                    && self.unsettled.get(&received.receipt.number()).is_some_and(|other| other.place > open.place)
            };
            let at = self.queue.iter().position(is_behind).unwrap_or(self.queue.len());
            self.queue.insert(at, open.received.clone());
            self.unsettled.insert(receipt.number(), open);
        }
    }
}

/// Where a session needs nothing beside it.
#[cfg(feature = "redis")]
impl<P: Ord + Copy> crate::sessions::Held for Deliveries<P> {
    fn take(&mut self, max: Bound) -> Option<Arrival> {
        Self::take(self, max)
    }

    fn settle(&mut self, answers: &[(Receipt, Answer)]) {
        Self::settle(self, answers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deliveries() -> Deliveries<i64> {
        Deliveries::new(7, 10, 100)
    }

    fn arrive(deliveries: &mut Deliveries<i64>, partition: u32, place: i64) {
        let message = Message::new("orders", "order.placed", vec![0; 10]);
        let id = Some(message.id);
        deliveries.arrived(Taken { partition, place, next: place + 1, redelivered: false, id, message });
    }

    fn taken(deliveries: &mut Deliveries<i64>, messages: usize) -> Vec<Received> {
        match deliveries.take(Bound { messages, bytes: usize::MAX }) {
            Some(Arrival::Messages(messages)) => messages,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_what_has_nothing_open_before_it_is_committed() {
        let mut progress = Progress::from(10, 10);
        assert_eq!(progress.floor(), 10);
        [10, 11, 15].into_iter().for_each(|place| progress.read(place, place + 1));
        progress.settled(15);
        progress.settled(11);
        assert_eq!(progress.floor(), 10);
        progress.settled(10);
        assert_eq!(progress.floor(), 16, "places have gaps");
        progress.settled(10);
        assert_eq!(progress.floor(), 16);
    }

    #[test]
    fn a_delivery_that_is_given_back_comes_before_those_behind_it() {
        let mut deliveries = deliveries();
        let partition = deliveries.begin(0, 100);
        (0..5).for_each(|place| arrive(&mut deliveries, partition, place));
        let first = taken(&mut deliveries, 3);
        let requeue: Vec<_> = [1, 0].map(|n: usize| (first[n].receipt, Answer::Requeue)).to_vec();
        deliveries.settle(&requeue);
        let again: Vec<_> =
            taken(&mut deliveries, 10).into_iter().map(|received| (received.id, received.redelivered)).collect();
        assert_eq!(again[..2], [(first[0].id, true), (first[1].id, true)]);
        assert_eq!((again.len(), again[2].1), (4, false));
        deliveries.settle(&requeue);
        assert!(deliveries.take(Bound { messages: 1, bytes: 1 }).is_none(), "a receipt settles one delivery");
    }

    #[cfg(feature = "kafka")]
    #[test]
    fn what_is_revoked_cannot_be_settled_and_what_is_left_can() {
        let mut deliveries = deliveries();
        let (one, two) = (deliveries.begin(0, 100), deliveries.begin(50, 100));
        arrive(&mut deliveries, one, 0);
        arrive(&mut deliveries, two, 50);
        arrive(&mut deliveries, one, 1);
        let first = taken(&mut deliveries, 2);
        deliveries.revoke(one);
        let all = Bound { messages: 9, bytes: 1 };
        assert!(matches!(deliveries.take(all), Some(Arrival::Revoked(gone)) if gone == Partition(one)));
        assert!(deliveries.take(all).is_none(), "what waited of it is gone");
        deliveries.settle(&first.iter().map(|received| (received.receipt, Answer::Ack)).collect::<Vec<_>>());
        assert_eq!((deliveries.to_commit(one, false), deliveries.to_commit(two, false)), (None, Some((51, 100))));
        let three = deliveries.begin(0, 100);
        arrive(&mut deliveries, three, 0);
        deliveries.revoke(three);
        assert!(deliveries.take(all).is_none(), "nobody has seen anything of it");
    }

    #[test]
    fn there_is_room_for_so_many_messages_and_bytes() {
        let mut deliveries = deliveries();
        let partition = deliveries.begin(0, 100);
        (0..9).for_each(|place| arrive(&mut deliveries, partition, place));
        assert_eq!((deliveries.room(), deliveries.bytes_room()), (1, 10));
        arrive(&mut deliveries, partition, 9);
        assert_eq!(deliveries.room(), 0);
        let received = taken(&mut deliveries, 1);
        deliveries.settle(&[(received[0].receipt, Answer::Reject)]);
        assert_eq!(deliveries.room(), 1);
        assert_eq!(deliveries.to_commit(partition, false), Some((1, 100)));
        deliveries.committed(partition, 1, None);
        let both = (deliveries.to_commit(partition, false), deliveries.to_commit(partition, true));
        assert_eq!(both, (None, Some((1, 100))));
    }
}
