//! Receiving: a member of a consumer group. Offsets are committed only behind what is settled; a partition that is given back takes its
//! unsettled deliveries along.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postroom::{Answer, Arrival, Bound, Message, MessageId, Partition, Receipt, Received, Subscription, Unavailable};
use serde::Deserialize;
use tokio::sync::Notify;

use super::address::{self, Address};
use super::client::Watcher;
use super::group::{self, Alarm};
use super::progress::Progress;
use super::record;
use crate::OpenSubscriptionError;

/// A member that leaves tells the group first.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
const GROUP_BYTES_MAX: usize = 200;
/// A problem that keeps nobody from receiving is told so often.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// Numbers the sessions of all subscriptions of this process.
static SESSIONS: AtomicU64 = AtomicU64::new(1);

/// What to receive, and from where; `[inboxes.from]` with `kind = "kafka"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KafkaSubscriptionOptions {
    /// `kafka://` or, for TLS, `kafkas://` URL with brokers to begin with, as a sink has it.
    pub url: String,
    /// The topics.
    pub topics: Vec<String>,
    /// The consumer group; no two consumers share one.
    pub group: String,
    /// Who receives; a group that another consumer has received in is refused. Empty: that is not looked at.
    #[serde(skip)]
    pub consumer: String,
    /// Most deliveries handed out and not settled; 1000.
    #[serde(default = "default_prefetch")]
    pub prefetch: u16,
    /// Most bytes of deliveries handed out and not settled, in which one message may be larger; 64 MiB. The client
    /// library holds about 512 KiB for each partition besides.
    #[serde(default = "default_unsettled_bytes")]
    pub unsettled_bytes_max: u64,
}

fn default_prefetch() -> u16 {
    1000
}

fn default_unsettled_bytes() -> u64 {
    64 << 20
}

impl std::fmt::Debug for KafkaSubscriptionOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaSubscriptionOptions")
            .field("url", &address::shown(&self.url))
            .field("topics", &self.topics)
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

impl KafkaSubscriptionOptions {
    /// The defaults.
    pub fn new(url: impl Into<String>, topics: &[&str], group: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
            group: group.into(),
            consumer: String::new(),
            prefetch: default_prefetch(),
            unsettled_bytes_max: default_unsettled_bytes(),
        }
    }

    /// For this consumer alone.
    pub fn of_consumer(self, consumer: impl Into<String>) -> Self {
        Self { consumer: consumer.into(), ..self }
    }

    pub(super) fn opened(&self) -> Result<Address, String> {
        if self.topics.is_empty() {
            return Err("topics must name at least one topic".to_owned());
        }
        self.topics.iter().try_for_each(|topic| record::check_topic(topic))?;
        if self.group.is_empty() || self.group.len() > GROUP_BYTES_MAX || self.group.chars().any(char::is_control) {
            return Err(format!("group must have 1 to {GROUP_BYTES_MAX} bytes, and no control characters"));
        }
        if self.prefetch == 0 {
            return Err("prefetch must be at least 1".to_owned());
        }
        if self.unsettled_bytes_max == 0 {
            return Err("unsettled_bytes_max must be at least 1".to_owned());
        }
        let address = Address::parse(&self.url)?;
        address.files.read()?;
        Ok(address)
    }
}

/// A message as the member took it from a partition.
pub(super) struct Taken {
    /// What the session calls the partition.
    pub partition: u32,
    pub offset: i64,
    pub redelivered: bool,
    pub id: Option<MessageId>,
    pub message: Message,
}

/// How a partition stands with the group.
pub(super) struct Reserved {
    /// Everything before is settled.
    pub floor: i64,
    /// What is before may be handed out.
    pub reserved: i64,
    /// What comes next, unless there is a gap.
    pub next: i64,
}

/// One membership, from joining the group to leaving it.
pub(super) struct Session {
    number: u64,
    prefetch: usize,
    bytes_max: u64,
    held: StdMutex<Held>,
    arrived: Notify,
    /// Wakes the member's thread.
    pub alarm: Alarm,
    pub watcher: Watcher,
}

/// What was delivered and is not settled.
#[derive(Default)]
struct Held {
    queue: VecDeque<Received>,
    /// Partitions that somebody else has now.
    revoked: VecDeque<Partition>,
    /// By the number of the delivery.
    unsettled: HashMap<u64, Open>,
    partitions: HashMap<u32, Progress>,
    bytes: u64,
    /// Numbers of deliveries and of partitions.
    deliveries: u64,
    numbered: u32,
    has_joined: bool,
    /// What a person has to do, although messages come; and whether it was told lately.
    problem: Option<String>,
    problem_told: Option<Instant>,
    /// Nobody receives any more.
    is_left: bool,
    over: Option<String>,
    /// The thread has ended.
    is_gone: bool,
}

/// A delivery that is not settled.
struct Open {
    partition: u32,
    offset: i64,
    received: Received,
}

fn lock<T>(of: &StdMutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    /// Somebody still receives.
    pub fn is_wanted(&self) -> bool {
        !lock(&self.held).is_left
    }

    /// A partition begins at `offset`; what it is called.
    pub fn begin(&self, offset: i64, reserved: i64) -> u32 {
        let mut held = lock(&self.held);
        held.numbered = held.numbered.wrapping_add(1);
        let number = held.numbered;
        held.partitions.insert(number, Progress::from(offset, reserved));
        number
    }

    /// The group has given this member its part.
    pub fn joined(&self) {
        lock(&self.held).has_joined = true;
        self.told();
    }

    /// There is something that a receiver has to hear of.
    pub fn told(&self) {
        self.arrived.notify_one();
    }

    /// What a person has to do, although messages come.
    pub fn problem(&self, problem: Option<String>) {
        let mut held = lock(&self.held);
        if held.problem != problem {
            (held.problem, held.problem_told) = (problem, None);
            drop(held);
            self.told();
        }
    }

    /// The problem, every so often.
    fn problem_to_tell(&self) -> Option<String> {
        let mut held = lock(&self.held);
        if held.problem.is_none() || held.problem_told.is_some_and(|told| told.elapsed() < TELL_EVERY) {
            return None;
        }
        held.problem_told = Some(Instant::now());
        held.problem.clone()
    }

    pub fn has_room(&self) -> bool {
        let held = lock(&self.held);
        held.unsettled.len() < self.prefetch && (held.bytes < self.bytes_max || held.unsettled.is_empty())
    }

    /// How a partition stands with the group. One that is not there any more reserves everything: nothing of it is handed out.
    pub fn reserved(&self, partition: u32) -> Reserved {
        let gone = Reserved { floor: 0, reserved: i64::MAX, next: 0 };
        lock(&self.held).partitions.get(&partition).map_or(gone, |progress| Reserved {
            floor: progress.floor(),
            reserved: progress.reserved,
            next: progress.next(),
        })
    }

    /// It is over, and why.
    pub fn ended(&self, why: String) {
        lock(&self.held).over.get_or_insert(why);
        self.told();
    }

    pub fn arrived(&self, taken: Taken) {
        let mut held = lock(&self.held);
        let Taken { partition, offset, redelivered, id, message } = taken;
        let Some(progress) = held.partitions.get_mut(&partition) else { return };
        progress.read(offset);
        held.bytes = held.bytes.saturating_add(message.payload.len() as u64);
        held.deliveries += 1;
        let receipt = Receipt::new(self.number, held.deliveries);
        let received = Received { receipt, partition: Partition(partition), redelivered, id, message };
        held.unsettled.insert(receipt.number(), Open { partition, offset, received: received.clone() });
        held.queue.push_back(received);
        drop(held);
        self.told();
    }

    /// The floor and the reservation of a partition, where the group has to be told.
    pub fn to_commit(&self, partition: u32, again: bool) -> Option<(i64, i64)> {
        let held = lock(&self.held);
        let progress = held.partitions.get(&partition)?;
        let floor = progress.floor();
        (again || floor != progress.committed).then_some((floor, progress.reserved))
    }

    /// The group was told.
    pub fn committed(&self, partition: u32, floor: i64, reserved: Option<i64>) {
        if let Some(progress) = lock(&self.held).partitions.get_mut(&partition) {
            progress.committed = floor;
            progress.reserved = reserved.unwrap_or(progress.reserved);
        }
    }

    /// Somebody else has this partition now: nothing of it can be settled here any more.
    pub fn revoke(&self, partition: u32) {
        let mut held = lock(&self.held);
        held.partitions.remove(&partition);
        let queued = held.queue.len();
        held.queue.retain(|received| received.partition != Partition(partition));
        let dropped = queued - held.queue.len();
        let open = held.unsettled.len();
        held.unsettled.retain(|_, open| open.partition != partition);
        held.bytes = held.unsettled.values().map(|open| open.received.message.payload.len() as u64).sum();
        if open - held.unsettled.len() > dropped {
            held.revoked.push_back(Partition(partition));
        }
        drop(held);
        self.told();
    }

    /// Hands out what is there.
    fn take(&self, max: Bound) -> Option<Arrival> {
        let mut held = lock(&self.held);
        if let Some(partition) = held.revoked.pop_front() {
            return Some(Arrival::Revoked(partition));
        }
        let (mut taken, mut bytes) = (Vec::new(), 0_usize);
        while let Some(next) = held.queue.front() {
            bytes = bytes.saturating_add(next.message.payload.len());
            if taken.len() >= max.messages.max(1) || (!taken.is_empty() && bytes > max.bytes) {
                break;
            }
            taken.extend(held.queue.pop_front());
        }
        (!taken.is_empty()).then_some(Arrival::Messages(taken))
    }

    fn settle(&self, answers: &[(Receipt, Answer)]) {
        let mut held = lock(&self.held);
        let mut again = Vec::new();
        for (receipt, answer) in answers.iter().filter(|(receipt, _)| receipt.session() == self.number) {
            // One that was settled already, or whose partition is somebody else's.
            let Some(open) = held.unsettled.remove(&receipt.number()) else { continue };
            if *answer == Answer::Requeue {
                again.push(open);
                continue;
            }
            held.bytes = held.bytes.saturating_sub(open.received.message.payload.len() as u64);
            if let Some(progress) = held.partitions.get_mut(&open.partition) {
                progress.settled(open.offset);
            }
        }
        // Each before those that come behind it in its partition.
        again.sort_unstable_by_key(|open| (open.partition, open.offset));
        for mut open in again {
            held.deliveries += 1;
            let receipt = Receipt::new(self.number, held.deliveries);
            (open.received.receipt, open.received.redelivered) = (receipt, true);
            let is_behind = |received: &Received| {
                received.partition == open.received.partition
                    && held.unsettled.get(&received.receipt.number()).is_some_and(|other| other.offset > open.offset)
            };
            let at = held.queue.iter().position(is_behind).unwrap_or(held.queue.len());
            held.queue.insert(at, open.received.clone());
            held.unsettled.insert(receipt.number(), open);
        }
        drop(held);
        self.alarm.ring();
        self.told();
    }

    /// Nobody receives any more.
    fn leave(&self) {
        lock(&self.held).is_left = true;
        self.alarm.ring();
    }

    fn over(&self) -> Option<String> {
        lock(&self.held).over.clone()
    }
}

/// Receives from topics of one cluster.
pub struct KafkaSubscription {
    options: KafkaSubscriptionOptions,
    address: Address,
    session: StdMutex<Option<Arc<Session>>>,
}

impl Drop for KafkaSubscription {
    fn drop(&mut self) {
        if let Some(session) = lock(&self.session).take() {
            session.leave();
        }
    }
}

impl KafkaSubscription {
    /// Checks the options; joins the group with the first `receive`.
    pub fn new(options: KafkaSubscriptionOptions) -> Result<Self, OpenSubscriptionError> {
        let address = options.opened().map_err(|problem| OpenSubscriptionError { kind: "kafka", problem })?;
        Ok(Self { options, address, session: StdMutex::default() })
    }

    fn unavailable(&self, error: impl Into<postroom::BoxError>) -> Unavailable {
        let KafkaSubscriptionOptions { topics, group, .. } = &self.options;
        let (topics, brokers) = (topics.join(", "), &self.address.brokers);
        Unavailable::new(format!("topics {topics} in group {group:?} of Kafka at {brokers}"), error)
    }

    fn current(&self) -> Result<Arc<Session>, Unavailable> {
        let mut current = lock(&self.session);
        if let Some(session) = current.as_ref() {
            return Ok(session.clone());
        }
        let session = Arc::new(Session {
            number: SESSIONS.fetch_add(1, Ordering::Relaxed),
            prefetch: usize::from(self.options.prefetch),
            bytes_max: self.options.unsettled_bytes_max,
            held: StdMutex::default(),
            arrived: Notify::new(),
            alarm: Alarm::default(),
            watcher: Watcher::default(),
        });
        let (member, address, options) = (session.clone(), self.address.clone(), self.options.clone());
        let work = move || {
            let working = AssertUnwindSafe(|| group::work(&member, &address, &options));
            let worked = catch_unwind(working).unwrap_or_else(|_| Err("the member's thread has panicked".to_owned()));
            let mut held = lock(&member.held);
            held.is_gone = true;
            held.over.get_or_insert(worked.err().unwrap_or_else(|| "the session was closed".to_owned()));
            drop(held);
            member.told();
        };
        let thread = std::thread::Builder::new().name("kafka-group".to_owned()).spawn(work);
        thread.map_err(|error| self.unavailable(error))?;
        *current = Some(session.clone());
        Ok(session)
    }

    /// Forgets a session that is over.
    fn forget(&self, session: &Arc<Session>) {
        let mut current = lock(&self.session);
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, session)) {
            *current = None;
        }
    }

    /// Waits until the group has given this member its part; `receive` does it otherwise.
    pub async fn connect(&self) -> Result<(), Unavailable> {
        let session = self.current()?;
        loop {
            let heard = session.arrived.notified();
            if let Some(why) = session.over() {
                self.forget(&session);
                return Err(self.unavailable(why));
            }
            if lock(&session.held).has_joined {
                // Whoever receives has to look too.
                session.told();
                return Ok(());
            }
            heard.await;
        }
    }
}

#[async_trait]
impl Subscription for KafkaSubscription {
    fn system(&self) -> &'static str {
        "kafka"
    }

    fn origin(&self) -> String {
        format!("group {:?} of Kafka", self.options.group)
    }

    fn is_connected(&self) -> bool {
        lock(&self.session)
            .as_ref()
            .is_some_and(|session| session.watcher.down().is_none() && lock(&session.held).has_joined)
    }

    async fn receive(&self, max: Bound) -> Result<Arrival, Unavailable> {
        let session = self.current()?;
        loop {
            let heard = session.arrived.notified();
            if let Some(arrival) = session.take(max) {
                return Ok(arrival);
            }
            if let Some(why) = session.over() {
                self.forget(&session);
                return Err(self.unavailable(why));
            }
            if let Some(why) = session.watcher.down() {
                // The member goes on by itself when a broker is back.
                return Err(self.unavailable(why));
            }
            if let Some(problem) = session.problem_to_tell() {
                return Err(self.unavailable(problem));
            }
            // Of a problem that stays, something is heard again.
            let _ = tokio::time::timeout(TELL_EVERY, heard).await;
        }
    }

    async fn settle(&self, answers: &[(Receipt, Answer)]) -> Result<(), Unavailable> {
        let gone = || self.unavailable("the session that the message came in is over; it comes again");
        let session = lock(&self.session).clone().ok_or_else(gone)?;
        session.settle(answers);
        let is_stale = answers.iter().any(|(receipt, _)| receipt.session() != session.number);
        if is_stale || session.over().is_some() { Err(gone()) } else { Ok(()) }
    }

    async fn close(&self) {
        let Some(session) = lock(&self.session).take() else { return };
        session.leave();
        let gone = async {
            loop {
                let heard = session.arrived.notified();
                if lock(&session.held).is_gone {
                    return;
                }
                heard.await;
            }
        };
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, gone).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> Session {
        Session {
            number: 7,
            prefetch: 10,
            bytes_max: 100,
            held: StdMutex::default(),
            arrived: Notify::new(),
            alarm: Alarm::default(),
            watcher: Watcher::default(),
        }
    }

    fn arrive(session: &Session, partition: u32, offset: i64) {
        let message = Message::new("orders", "order.placed", vec![0; 10]);
        session.arrived(Taken { partition, offset, redelivered: false, id: Some(message.id), message });
    }

    fn taken(session: &Session, messages: usize) -> Vec<Received> {
        match session.take(Bound { messages, bytes: usize::MAX }) {
            Some(Arrival::Messages(messages)) => messages,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_delivery_that_is_given_back_comes_before_those_behind_it() {
        let session = session();
        let partition = session.begin(0, 100);
        (0..5).for_each(|offset| arrive(&session, partition, offset));
        let first = taken(&session, 3);
        let requeue: Vec<_> = [1, 0].map(|n: usize| (first[n].receipt, Answer::Requeue)).to_vec();
        session.settle(&requeue);
        let again: Vec<_> =
            taken(&session, 10).into_iter().map(|received| (received.id, received.redelivered)).collect();
        assert_eq!(again[..2], [(first[0].id, true), (first[1].id, true)]);
        assert_eq!((again.len(), again[2].1), (4, false));
        session.settle(&requeue);
        assert!(session.take(Bound { messages: 1, bytes: 1 }).is_none(), "a receipt settles one delivery");
    }

    #[test]
    fn what_is_revoked_cannot_be_settled_and_what_is_left_can() {
        let session = session();
        let (one, two) = (session.begin(0, 100), session.begin(50, 100));
        arrive(&session, one, 0);
        arrive(&session, two, 50);
        arrive(&session, one, 1);
        let first = taken(&session, 2);
        session.revoke(one);
        assert!(
            matches!(session.take(Bound { messages: 9, bytes: 1 }), Some(Arrival::Revoked(gone)) if gone == Partition(one))
        );
        assert!(session.take(Bound { messages: 9, bytes: 1 }).is_none(), "what waited of it is gone");
        session.settle(&first.iter().map(|received| (received.receipt, Answer::Ack)).collect::<Vec<_>>());
        assert_eq!((session.to_commit(one, false), session.to_commit(two, false)), (None, Some((51, 100))));
        let three = session.begin(0, 100);
        arrive(&session, three, 0);
        session.revoke(three);
        assert!(session.take(Bound { messages: 9, bytes: 1 }).is_none(), "nobody has seen anything of it");
    }

    #[test]
    fn there_is_room_for_so_many_messages_and_bytes() {
        let session = session();
        let partition = session.begin(0, 100);
        (0..9).for_each(|offset| arrive(&session, partition, offset));
        assert!(session.has_room());
        arrive(&session, partition, 9);
        assert!(!session.has_room());
        let received = taken(&session, 1);
        session.settle(&[(received[0].receipt, Answer::Reject)]);
        assert!(session.has_room());
        assert_eq!(session.to_commit(partition, false), Some((1, 100)));
        session.committed(partition, 1, None);
        assert_eq!((session.to_commit(partition, false), session.to_commit(partition, true)), (None, Some((1, 100))));
    }
}
