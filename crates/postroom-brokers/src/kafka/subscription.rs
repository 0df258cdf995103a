//! Receiving: a member of a consumer group. Offsets are committed only behind what is settled; a partition that is given back takes its
//! unsettled deliveries along.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postroom::{Answer, Arrival, Bound, Receipt, Subscription, Unavailable};
use serde::Deserialize;
use tokio::sync::Notify;

use super::address::{self, Address};
use super::client::Watcher;
use super::group::{self, Alarm};
use super::record;
use crate::OpenSubscriptionError;
use crate::deliveries::{Deliveries, Taken};

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
    held: StdMutex<Held>,
    arrived: Notify,
    /// Wakes the member's thread.
    pub alarm: Alarm,
    pub watcher: Watcher,
}

/// What the member's thread and the receiver share.
struct Held {
    deliveries: Deliveries<i64>,
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

fn lock<T>(of: &StdMutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    fn new(options: &KafkaSubscriptionOptions) -> Self {
        let number = SESSIONS.fetch_add(1, Ordering::Relaxed);
        let held = Held {
            deliveries: Deliveries::new(number, options.prefetch, options.unsettled_bytes_max),
            has_joined: false,
            problem: None,
            problem_told: None,
            is_left: false,
            over: None,
            is_gone: false,
        };
        Self {
            number,
            held: StdMutex::new(held),
            arrived: Notify::new(),
            alarm: Alarm::default(),
            watcher: Watcher::default(),
        }
    }

    /// Somebody still receives.
    pub fn is_wanted(&self) -> bool {
        !lock(&self.held).is_left
    }

    /// A partition begins at `offset`; what it is called.
    pub fn begin(&self, offset: i64, reserved: i64) -> u32 {
        lock(&self.held).deliveries.begin(offset, reserved)
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
        lock(&self.held).deliveries.room() > 0
    }

    /// How a partition stands with the group. One that is not there any more reserves everything: nothing of it is handed out.
    pub fn reserved(&self, partition: u32) -> Reserved {
        let gone = Reserved { floor: 0, reserved: i64::MAX, next: 0 };
        lock(&self.held).deliveries.progress(partition).map_or(gone, |progress| Reserved {
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

    pub fn arrived(&self, taken: Taken<i64>) {
        lock(&self.held).deliveries.arrived(taken);
        self.told();
    }

    /// The floor and the reservation of a partition, where the group has to be told.
    pub fn to_commit(&self, partition: u32, again: bool) -> Option<(i64, i64)> {
        lock(&self.held).deliveries.to_commit(partition, again)
    }

    /// The group was told.
    pub fn committed(&self, partition: u32, floor: i64, reserved: Option<i64>) {
        lock(&self.held).deliveries.committed(partition, floor, reserved);
    }

    /// Somebody else has this partition now: nothing of it can be settled here any more.
    pub fn revoke(&self, partition: u32) {
        lock(&self.held).deliveries.revoke(partition);
        self.told();
    }

    fn settle(&self, answers: &[(Receipt, Answer)]) {
        lock(&self.held).deliveries.settle(answers);
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
        let session = Arc::new(Session::new(&self.options));
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
            if let Some(arrival) = lock(&session.held).deliveries.take(max) {
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
