//! Pure: what was received and waits for a worker. Messages of one key leave one after the other; keys take turns.

use std::collections::{HashMap, HashSet, VecDeque};

use postroom::{MessageId, Partition, Received};

/// A message from the broker.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub received: Received,
    /// It travels in a transaction of its own: a batch with it failed, or it is committed before it is begun.
    pub single: bool,
    /// Whoever began it last time may have died of it, or its handler calls the outside: that it is begun is committed first.
    pub careful: bool,
    /// Why it cannot be kept among the messages that wait.
    pub unkeepable: Option<String>,
}

impl Arrival {
    /// One that nothing special is known of.
    pub fn of(received: Received) -> Self {
        Self { received, single: false, careful: false, unkeepable: None }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Slot {
    Key(String),
    Alone(MessageId),
}

impl Slot {
    pub fn of(received: &Received) -> Self {
        match received.message.ordering_key() {
            Some(key) => Self::Key(key.to_owned()),
            None => Self::Alone(received.message.id),
        }
    }
}

#[derive(Default)]
pub(crate) struct Queue {
    slots: HashMap<Slot, VecDeque<Arrival>>,
    ready: VecDeque<Slot>,
    busy: HashSet<Slot>,
}

impl Queue {
    pub fn push(&mut self, arrival: Arrival) {
        let slot = Slot::of(&arrival.received);
        let waiting = self.slots.entry(slot.clone()).or_default();
        waiting.push_back(arrival);
        if waiting.len() == 1 && !self.busy.contains(&slot) {
            self.ready.push_back(slot);
        }
    }

    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// What one worker takes: at most `max` messages; their keys are busy until they are released.
    pub fn pop(&mut self, max: usize) -> Vec<Arrival> {
        let mut batch: Vec<Arrival> = Vec::new();
        let mut turns = self.ready.len();
        while batch.len() < max && turns > 0 {
            turns -= 1;
            let Some(slot) = self.ready.pop_front() else { break };
            let Some(waiting) = self.slots.get_mut(&slot) else { continue };
            while batch.len() < max {
                let Some(next) = waiting.front() else { break };
                let alone = next.single || next.careful;
                if alone && !batch.is_empty() {
                    break;
                }
                // The same id twice is two deliveries of one message: one transaction cannot tell them apart.
                if batch.iter().any(|other| other.received.message.id == next.received.message.id) {
                    break;
                }
                batch.extend(waiting.pop_front());
                if alone {
                    break;
                }
            }
            if waiting.is_empty() {
                self.slots.remove(&slot);
            }
            let taken = batch.last().is_some_and(|last| Slot::of(&last.received) == slot);
            if taken {
                self.busy.insert(slot);
            } else if self.slots.contains_key(&slot) {
                self.ready.push_back(slot);
            }
            if batch.last().is_some_and(|last| last.single || last.careful) {
                break;
            }
        }
        // One order of keys for all workers, everywhere: batches that take locks by key do not deadlock.
        batch.sort_by(|one, other| one.received.message.ordering_key().cmp(&other.received.message.ordering_key()));
        batch
    }

    /// Puts back what was popped, to the front, in its order.
    pub fn put_back(&mut self, batch: Vec<Arrival>) {
        for arrival in batch.into_iter().rev() {
            self.slots.entry(Slot::of(&arrival.received)).or_default().push_front(arrival);
        }
    }

    /// These keys may go on.
    pub fn release(&mut self, slots: impl IntoIterator<Item = Slot>) {
        for slot in slots {
            if self.busy.remove(&slot) && self.slots.contains_key(&slot) {
                self.ready.push_back(slot);
            }
        }
    }

    /// Takes out what came from a partition that is somebody else's now.
    pub fn revoke(&mut self, partition: Partition) -> Vec<Arrival> {
        let mut revoked = Vec::new();
        for waiting in self.slots.values_mut() {
            let (gone, kept) =
                std::mem::take(waiting).into_iter().partition(|arrival| arrival.received.partition == partition);
            *waiting = kept;
            let gone: VecDeque<Arrival> = gone;
            revoked.extend(gone);
        }
        self.slots.retain(|_, waiting| !waiting.is_empty());
        let slots = &self.slots;
        self.ready.retain(|slot| slots.contains_key(slot));
        revoked
    }

    /// Everything that no worker has.
    pub fn drain(&mut self) -> Vec<Arrival> {
        self.ready.clear();
        std::mem::take(&mut self.slots).into_values().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use postroom::{Message, Receipt};

    use super::*;

    fn arrival(key: Option<&str>, single: bool) -> Arrival {
        let mut message = Message::new("orders", "order.placed", "");
        message.key = key.map(str::to_owned);
        Arrival { single, ..Arrival::of(received(message, 0)) }
    }

    fn received(message: Message, partition: u32) -> Received {
        let (receipt, partition) = (Receipt::new(0, 0), Partition(partition));
        Received { receipt, partition, redelivered: false, id: Some(message.id), message }
    }

    #[test]
    fn what_is_revoked_is_not_begun_and_the_rest_goes_on() {
        let mut queue = Queue::default();
        for (key, partition) in [("a", 1), ("b", 2), ("b", 2), ("c", 1)] {
            queue.push(Arrival::of(received(Message::new("orders", "order.placed", "").key(key), partition)));
        }
        assert_eq!(keys(&queue.pop(1)), [Some("a")]);
        assert_eq!(keys(&queue.revoke(Partition(2))), [Some("b"), Some("b")]);
        assert_eq!(keys(&queue.pop(9)), [Some("c")]);
        assert!(queue.drain().is_empty());
    }

    fn keys(batch: &[Arrival]) -> Vec<Option<&str>> {
        batch.iter().map(|arrival| arrival.received.message.key.as_deref()).collect()
    }

    #[test]
    fn a_key_waits_until_its_batch_is_released_and_others_flow() {
        let mut queue = Queue::default();
        for key in ["a", "a", "b", "a"] {
            queue.push(arrival(Some(key), false));
        }
        let first = queue.pop(2);
        assert_eq!(keys(&first), [Some("a"), Some("a")]);
        assert_eq!(keys(&queue.pop(9)), [Some("b")]);
        assert!(queue.pop(9).is_empty());
        queue.push(arrival(Some("a"), false));
        assert!(!queue.has_ready());
        queue.release(first.iter().map(|arrival| Slot::of(&arrival.received)));
        assert_eq!(keys(&queue.pop(9)), [Some("a"), Some("a")]);
    }

    #[test]
    fn what_travels_alone_does() {
        let mut queue = Queue::default();
        queue.push(arrival(Some("a"), false));
        queue.push(arrival(Some("a"), true));
        queue.push(arrival(Some("b"), false));
        queue.push(arrival(Some("c"), true));
        let first = queue.pop(9);
        assert_eq!(keys(&first), [Some("a"), Some("b")]);
        assert_eq!(keys(&queue.pop(9)), [Some("c")]);
        queue.release(first.iter().map(|arrival| Slot::of(&arrival.received)));
        assert_eq!(keys(&queue.pop(9)), [Some("a")]);
    }

    #[test]
    fn a_broken_batch_comes_back_in_its_order() {
        let mut queue = Queue::default();
        for _ in 0..3 {
            queue.push(arrival(Some("a"), false));
        }
        let batch = queue.pop(2);
        let (slots, ids): (Vec<_>, Vec<_>) =
            batch.iter().map(|arrival| (Slot::of(&arrival.received), arrival.received.message.id)).unzip();
        queue.put_back(batch);
        queue.release(slots);
        let again: Vec<_> = queue.pop(9).iter().map(|arrival| arrival.received.message.id).collect();
        assert_eq!((again.len(), &again[..2]), (3, &ids[..]));
    }

    #[test]
    fn two_deliveries_of_one_message_are_not_in_one_batch() {
        let mut queue = Queue::default();
        let one = arrival(None, false);
        let again = Arrival { received: one.received.clone(), single: false, careful: false, unkeepable: None };
        queue.push(one);
        queue.push(again);
        assert_eq!(queue.pop(9).len(), 1);
    }
}
