//! The ledger of what was published in transactions: a topic in which each transaction lists its messages. A producer reads what was listed
//! last when it begins, and then knows what its predecessor has stored.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use postroom::{MessageId, Way};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::{Message as _, Offset, TopicPartitionList};

use super::address::Address;
use super::client;
use super::progress::print_of;

/// So many messages of a lane are recognised. More than [`IN_FLIGHT_MAX`], for relays that die one after the other.
pub(super) const RECOGNISED: usize = 20_000;
/// A relay may have no more on their way than this.
pub(super) const IN_FLIGHT_MAX: usize = 10_000;
const VERSION: u8 = 1;
const ENTRY_BYTES: usize = 40;
/// Looked at first, from the end; each further look goes four times as far back.
const LOOK_BACK: i64 = 2_000;
const POLL: Duration = Duration::from_millis(100);

/// A message in a topic, and the replay that sends it once more: a message may be stored once for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    id: u128,
    /// Zero: its first time.
    replay: u128,
    /// A hash of the topic's name: what is stored in one is not stored in another.
    topic: u64,
}

impl Entry {
    pub fn of(id: MessageId, way: &Way, topic: &str) -> Self {
        let replay = way.replay.map_or(0, |operation| operation.as_uuid().as_u128());
        Self { id: id.as_uuid().as_u128(), replay, topic: print_of([topic.as_bytes()]) }
    }
}

/// A record of the ledger.
pub(super) fn written(name: &str, entries: impl Iterator<Item = Entry>) -> Vec<u8> {
    let name = &name.as_bytes()[..name.len().min(usize::from(u8::MAX))];
    let mut record = vec![VERSION, name.len() as u8];
    record.extend_from_slice(name);
    for Entry { id, replay, topic } in entries {
        record.extend_from_slice(&id.to_be_bytes());
        record.extend_from_slice(&replay.to_be_bytes());
        record.extend_from_slice(&topic.to_be_bytes());
    }
    record
}

/// The entries of a record, if it is of this name.
pub(super) fn read<'a>(record: &'a [u8], name: &str) -> Option<impl Iterator<Item = Entry> + 'a> {
    let [VERSION, length, rest @ ..] = record else { return None };
    let (found, entries) = rest.split_at_checked(usize::from(*length))?;
    let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| (number << 8) | u128::from(*byte));
    let entry = move |bytes: &[u8]| Entry {
        id: number(&bytes[..16]),
        replay: number(&bytes[16..32]),
        topic: number(&bytes[32..]) as u64,
    };
    (found == name.as_bytes()).then(|| entries.chunks_exact(ENTRY_BYTES).map(entry))
}

/// What was stored last, each once.
#[derive(Default)]
pub(super) struct Stored {
    entries: HashSet<Entry>,
    order: VecDeque<Entry>,
}

impl Stored {
    pub fn has(&self, entry: &Entry) -> bool {
        self.entries.contains(entry)
    }

    pub fn add(&mut self, entry: Entry) {
        if self.entries.insert(entry) {
            self.order.push_back(entry);
        }
        if self.order.len() > RECOGNISED
            && let Some(oldest) = self.order.pop_front()
        {
            self.entries.remove(&oldest);
        }
    }
}

/// What the ledger lists last under a name. Blocks, and waits until no transaction is open that was begun before.
pub(super) fn last(
    address: &Address,
    (topic, partition): (&str, i32),
    name: &str,
    within: Duration,
) -> Result<Stored, String> {
    let by = Instant::now() + within;
    let of = |isolation: &str| -> Result<BaseConsumer, String> {
        let mut config = client::config(address)?;
        // Nothing is committed, and no group is joined.
        config.set("group.id", name).set("enable.auto.commit", "false").set("enable.auto.offset.store", "false");
        config.set("isolation.level", isolation).set("enable.partition.eof", "true");
        // Nothing is passed over in silence.
        config.set("allow.auto.create.topics", "false").set("auto.offset.reset", "error");
        config.create().map_err(|error| error.to_string())
    };
    let problem = |error: KafkaError| format!("read what the ledger {topic:?} lists: {error}");
    let (_, end) = of("read_uncommitted")?.fetch_watermarks(topic, partition, left(by)).map_err(problem)?;
    let committed = of("read_committed")?;
    let begin = loop {
        let (begin, stable) = committed.fetch_watermarks(topic, partition, left(by)).map_err(problem)?;
        if stable >= end {
            break begin;
        }
        if Instant::now() >= by {
            return Err(format!(
                "partition {partition} of the ledger {topic:?} has a transaction that nobody has ended. Either another producer uses this ledger: \
                 give each route one of its own, with as many partitions as the outbox has lanes. Or a broker that was killed has forgotten it: \
                 `kafka-transactions.sh find-hanging` lists it (docs/kafka.md)"
            ));
        }
        let _ = committed.poll(POLL);
    };
    let mut back = LOOK_BACK;
    loop {
        let from = end.saturating_sub(back).max(begin);
        read_from(&committed, (topic, partition), from, name, by)?;
        // A broker that has just become the leader may not know yet how far it is, and would end too early; it says so when it is asked.
        let (_, stable) = committed.fetch_watermarks(topic, partition, left(by)).map_err(problem)?;
        if stable < end {
            return Err(format!("the ledger {topic:?} has become shorter while it was read"));
        }
        let stored = read_from(&committed, (topic, partition), from, name, by)?;
        if stored.order.len() >= RECOGNISED || from <= begin {
            return Ok(stored);
        }
        back = back.saturating_mul(4);
    }
}

fn read_from(
    consumer: &BaseConsumer,
    (topic, partition): (&str, i32),
    from: i64,
    name: &str,
    by: Instant,
) -> Result<Stored, String> {
    let problem = |error: KafkaError| format!("read what the ledger {topic:?} lists: {error}");
    let mut at = TopicPartitionList::new();
    at.add_partition_offset(topic, partition, Offset::Offset(from)).map_err(problem)?;
    consumer.assign(&at).map_err(problem)?;
    let mut stored = Stored::default();
    loop {
        match consumer.poll(POLL) {
            Some(Ok(record)) => {
                let entries = record.payload().and_then(|record| read(record, name));
                entries.into_iter().flatten().for_each(|entry| stored.add(entry));
            }
            Some(Err(KafkaError::PartitionEOF(_))) => return Ok(stored),
            Some(Err(error)) if error.rdkafka_error_code().is_some_and(is_passing) => {}
            Some(Err(error)) => return Err(problem(error)),
            None => {}
        }
        if Instant::now() >= by {
            return Err(format!("the ledger {topic:?} was not read in time; its end is not known"));
        }
    }
}

/// The client tries again by itself.
fn is_passing(code: rdkafka::error::RDKafkaErrorCode) -> bool {
    use rdkafka::error::RDKafkaErrorCode as Code;
    // Nothing is asked of the group, whose name the library needs.
    matches!(
        code,
        Code::BrokerTransportFailure | Code::AllBrokersDown | Code::OperationTimedOut | Code::GroupAuthorizationFailed
    )
}

fn left(by: Instant) -> Duration {
    by.saturating_duration_since(Instant::now()).max(Duration::from_millis(100))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_written_is_read_under_its_name_alone() {
        let entries: Vec<Entry> = (1..5).map(|n| Entry { id: n << 100, replay: n % 2, topic: n as u64 }).collect();
        let record = written("shop-3", entries.iter().copied());
        assert_eq!(read(&record, "shop-3").unwrap().collect::<Vec<_>>(), entries);
        assert!(read(&record, "shop-33").is_none() && read(&record, "shop").is_none());
    }

    #[test]
    fn the_oldest_is_forgotten_first() {
        let mut stored = Stored::default();
        let entry = |n: usize| Entry { id: n as u128, replay: 0, topic: 7 };
        (0..RECOGNISED + 2).for_each(|n| stored.add(entry(n)));
        (0..10).for_each(|_| stored.add(entry(5)));
        assert!(!stored.has(&entry(1)) && stored.has(&entry(2)) && stored.has(&entry(RECOGNISED + 1)));
        assert!(!stored.has(&Entry { replay: 1, ..entry(5) }), "a replay is another time");
        assert!(!stored.has(&Entry { topic: 8, ..entry(5) }), "another topic is another place");
    }

    proptest! {
        #[test]
        fn any_record_is_read(record in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&record, "shop-3").map(Iterator::count);
        }
    }
}
