//! A member of a consumer group, on a thread of its own: the client library asks for partitions to be taken and given back while it is polled,
//! and waits for the brokers in some of its calls.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex as StdMutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::{BorrowedMessage, Message as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::types::RDKafkaRespErr as Native;

use super::address::Address;
use super::client::{self, Watcher};
use super::progress::{self, Begin, Committed, Told};
use super::record;
use super::subscription::{KafkaSubscriptionOptions, Session, Taken};

/// The library is polled this often, so that it hears of partitions that come and go.
const POLLED_EVERY: Duration = Duration::from_millis(100);
/// The group is told of what was settled no more often than this.
const COMMITTED_EVERY: Duration = Duration::from_millis(100);
/// What a session may have handed out is told the group before, so many messages at a time.
const RESERVED: i64 = 2_000;
/// Messages of one partition before the others have their turn.
const AT_ONCE: usize = 100;
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// While no broker is there, one is asked this often.
const ASKED_EVERY: Duration = Duration::from_secs(1);

/// Wakes the thread.
#[derive(Default)]
pub(super) struct Alarm {
    rung: StdMutex<bool>,
    heard: Condvar,
}

impl Alarm {
    pub fn ring(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.heard.notify_one();
    }

    fn wait(&self, most: Duration) {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.heard.wait_timeout_while(rung, most, |rung| !*rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}

/// What the group wants of this member.
enum Change {
    Assigned(TopicPartitionList),
    Revoked(TopicPartitionList),
}

/// Hears what the library says.
pub(super) struct Context {
    watcher: Watcher,
    changes: StdMutex<Vec<Change>>,
    /// The library closes: what it gives back is nobody's any more.
    closing: StdMutex<bool>,
    commit_failed: StdMutex<bool>,
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.watcher.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.watcher.error(error, reason);
    }
}

fn lock<T>(of: &StdMutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ConsumerContext for Context {
    /// Only noted: where a partition begins has to be asked first, and that not while the library is being polled.
    fn rebalance(&self, consumer: &BaseConsumer<Self>, wanted: Native, partitions: &mut TopicPartitionList) {
        if *lock(&self.closing) {
            let _ = match consumer.rebalance_protocol() {
                RebalanceProtocol::Cooperative => consumer.incremental_unassign(partitions),
                _ => consumer.unassign(),
            };
            return;
        }
        let partitions = partitions.clone();
        let change = match wanted {
            Native::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => Change::Assigned(partitions),
            _ => Change::Revoked(partitions),
        };
        lock(&self.changes).push(change);
    }

    fn commit_callback(&self, result: Result<(), KafkaError>, _: &TopicPartitionList) {
        if let Err(error) = result
            && !matches!(error, KafkaError::ConsumerCommit(Code::NoOffset))
        {
            tracing::debug!("the group did not take what was settled: {error}");
            *lock(&self.commit_failed) = true;
        }
    }
}

/// One partition that this member has.
struct Mine {
    topic: String,
    partition: i32,
    /// What the session calls it.
    number: u32,
    known_before: i64,
    queue: PartitionQueue<Context>,
}

/// Works as long as the session is wanted; then it leaves the group. Why it ended before.
pub(super) fn work(
    session: &Arc<Session>,
    address: &Address,
    options: &KafkaSubscriptionOptions,
) -> Result<(), String> {
    let mut config = client::config(address)?;
    config.set("group.id", &options.group).set("enable.auto.commit", "false").set("enable.auto.offset.store", "false");
    config.set("partition.assignment.strategy", "cooperative-sticky").set("auto.offset.reset", "error");
    config.set("session.timeout.ms", "10000").set("heartbeat.interval.ms", "1000").set("socket.timeout.ms", "10000");
    config.set("isolation.level", "read_committed").set("check.crcs", "true").set("allow.auto.create.topics", "false");
    config.set("topic.metadata.refresh.interval.ms", "60000").set("fetch.queue.backoff.ms", "10");
    config.set("queued.max.messages.kbytes", "16384").set("queued.min.messages", "10000");
    let context = Context {
        watcher: session.watcher.clone(),
        changes: StdMutex::default(),
        closing: StdMutex::default(),
        commit_failed: StdMutex::default(),
    };
    let mut consumer: BaseConsumer<Context> = config.create_with_context(context).map_err(|error| error.to_string())?;
    let alarm = session.clone();
    consumer.set_nonempty_callback(move || alarm.alarm.ring());
    let mut member = Member {
        session,
        options,
        consumer: Arc::new(consumer),
        mine: Vec::new(),
        last_commit: Instant::now(),
        asked: None,
    };
    let worked = member.work();
    // Whoever is next begins behind what was settled.
    member.commit(CommitMode::Sync);
    member.mine.clear();
    *lock(&member.consumer.context().closing) = true;
    worked
}

struct Member<'a> {
    session: &'a Arc<Session>,
    options: &'a KafkaSubscriptionOptions,
    consumer: Arc<BaseConsumer<Context>>,
    mine: Vec<Mine>,
    last_commit: Instant,
    /// When a broker was asked last, while none is there.
    asked: Option<Instant>,
}

impl Member<'_> {
    fn work(&mut self) -> Result<(), String> {
        self.topics()?;
        let topics: Vec<&str> = self.options.topics.iter().map(String::as_str).collect();
        self.consumer.subscribe(&topics).map_err(|error| error.to_string())?;
        while self.session.is_wanted() {
            self.hear()?;
            let any = self.fetch()?;
            if self.last_commit.elapsed() >= COMMITTED_EVERY {
                self.commit(CommitMode::Async);
            }
            self.look_whether_a_broker_is_back();
            if !any {
                self.session.alarm.wait(POLLED_EVERY);
            }
        }
        Ok(())
    }

    /// The topics exist: subscribing to one that does not is no error for the library.
    fn topics(&self) -> Result<(), String> {
        for topic in &self.options.topics {
            let metadata =
                self.consumer.fetch_metadata(Some(topic), ANSWERS_WITHIN).map_err(|error| self.why(&error))?;
            let found = metadata.topics().iter().find(|found| found.name() == topic);
            match found.and_then(|found| found.error()).map(Code::from) {
                Some(Code::UnknownTopicOrPartition | Code::UnknownTopic) => return Err(record::no_such_topic(topic)),
                Some(code) => return Err(about(code, &format!("topic {topic:?}"), &self.options.group)),
                None => {}
            }
        }
        self.session.watcher.is_up();
        Ok(())
    }

    fn why(&self, error: &KafkaError) -> String {
        self.session.watcher.down().or_else(|| self.session.watcher.last()).unwrap_or_else(|| error.to_string())
    }

    /// What the group wants, and what went wrong.
    fn hear(&mut self) -> Result<(), String> {
        // A rebalance is heard with a poll that brings nothing.
        let error = match self.consumer.poll(Duration::ZERO) {
            Some(Err(error)) => Some(error),
            // Each partition has a queue of its own.
            Some(Ok(message)) => return Err(format!("a message of partition {} came unasked", message.partition())),
            None => None,
        };
        if let Some(error) = error {
            self.failed(&error)?;
        }
        let changes = std::mem::take(&mut *lock(&self.consumer.context().changes));
        for change in changes {
            match change {
                Change::Assigned(partitions) => self.take(&partitions)?,
                Change::Revoked(partitions) => self.give_back(&partitions)?,
            }
        }
        Ok(())
    }

    /// An error that the library does not get over by itself ends the session.
    fn failed(&self, error: &KafkaError) -> Result<(), String> {
        let (KafkaError::MessageConsumption(code) | KafkaError::MessageConsumptionFatal(code)) = error else {
            tracing::debug!("the Kafka client says: {error}");
            return Ok(());
        };
        match code {
            Code::UnknownTopicOrPartition | Code::UnknownTopic => {
                Err(record::no_such_topic(&self.options.topics.join(", ")))
            }
            Code::TopicAuthorizationFailed
            | Code::GroupAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::InconsistentGroupProtocol => Err(about(*code, "the topics", &self.options.group)),
            // What is there was removed, or is not there any more: where to go on is asked anew.
            Code::AutoOffsetReset | Code::OffsetOutOfRange | Code::Fenced | Code::FencedInstanceId | Code::Fatal => {
                Err(error.to_string())
            }
            _ => {
                tracing::debug!("the Kafka client has trouble: {error}");
                Ok(())
            }
        }
    }

    /// Takes partitions, each from where the group stands.
    fn take(&mut self, partitions: &TopicPartitionList) -> Result<(), String> {
        let failed = |error: KafkaError| self.why(&error);
        let committed = self.consumer.committed_offsets(partitions.clone(), ANSWERS_WITHIN).map_err(failed)?;
        let mut begins = Vec::new();
        for element in committed.elements() {
            element.error().map_err(failed)?;
            let (topic, partition) = (element.topic().to_owned(), element.partition());
            let (low, high) = self.consumer.fetch_watermarks(&topic, partition, ANSWERS_WITHIN).map_err(failed)?;
            let committed = match element.offset() {
                Offset::Offset(offset) => {
                    Some(Committed { offset, reserved: progress::reserved_of(element.metadata()) })
                }
                _ => None,
            };
            let begin = progress::begin(committed.as_ref(), low, high);
            self.tell(&topic, partition, &begin);
            begins.push((topic, partition, begin));
        }
        let mut told = TopicPartitionList::new();
        for (topic, partition, begin) in &begins {
            add(&mut told, topic, *partition, begin.offset, begin.offset.saturating_add(RESERVED)).map_err(failed)?;
        }
        if !begins.is_empty() {
            self.consumer.commit(&told, CommitMode::Sync).map_err(failed)?;
        }
        let mut assigned = TopicPartitionList::new();
        for (topic, partition, Begin { offset, known_before, .. }) in begins {
            let added = assigned.add_partition_offset(&topic, partition, Offset::Offset(offset));
            added.map_err(|error| error.to_string())?;
            // Before anything is fetched, so that nothing of it goes into the common queue.
            let queue = self.consumer.split_partition_queue(&topic, partition);
            let mut queue = queue.ok_or_else(|| format!("partition {partition} of topic {topic:?} has no queue"))?;
            let session = self.session.clone();
            queue.set_nonempty_callback(move || session.alarm.ring());
            let number = self.session.begin(offset, offset.saturating_add(RESERVED));
            self.mine.push(Mine { topic, partition, number, known_before, queue });
        }
        self.consumer.incremental_assign(&assigned).map_err(|error| self.why(&error))?;
        self.session.watcher.is_up();
        self.session.joined();
        Ok(())
    }

    fn tell(&self, topic: &str, partition: i32, begin: &Begin) {
        let group = &self.options.group;
        match begin.told {
            None => {}
            Some(Told::Removed(count)) => tracing::error!(
                "{count} offsets of partition {partition} of topic {topic:?} were removed from Kafka before group {group:?} received them: \
                 messages are lost unless they were received in another way; compare with `postroom reconcile`, and keep messages for longer \
                 (retention.ms, retention.bytes)"
            ),
            Some(Told::WentBack { received, end }) => tracing::warn!(
                "partition {partition} of topic {topic:?} ends at {end}, and group {group:?} had received up to {received}: the topic was made anew or \
                 went back; it is received again from its beginning, and an inbox recognises what it had"
            ),
        }
    }

    fn give_back(&mut self, partitions: &TopicPartitionList) -> Result<(), String> {
        let is_lost = self.consumer.assignment_lost();
        if !is_lost {
            // Whoever has it next begins behind what was settled.
            self.commit(CommitMode::Sync);
        }
        for element in partitions.elements() {
            let at = self
                .mine
                .iter()
                .position(|mine| mine.topic == element.topic() && mine.partition == element.partition());
            if let Some(at) = at {
                let mine = self.mine.swap_remove(at);
                self.session.revoke(mine.number);
            }
        }
        let done = match self.consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => self.consumer.incremental_unassign(partitions),
            _ => self.consumer.unassign(),
        };
        done.map_err(|error| error.to_string())
    }

    /// Takes messages as far as there is room. Whether there were any.
    fn fetch(&mut self) -> Result<bool, String> {
        let mut any = false;
        for mine in &self.mine {
            for _ in 0..AT_ONCE {
                if !self.session.has_room() {
                    return Ok(any);
                }
                match mine.queue.poll(Duration::ZERO) {
                    None => break,
                    Some(Err(error)) => self.failed(&error)?,
                    Some(Ok(message)) => {
                        any = true;
                        self.hand_out(mine, &message)?;
                    }
                }
            }
        }
        Ok(any)
    }

    fn hand_out(&self, mine: &Mine, message: &BorrowedMessage<'_>) -> Result<(), String> {
        let offset = message.offset();
        let (floor, reserved) = self.session.reserved(mine.number).unwrap_or((offset, i64::MAX));
        if offset >= reserved {
            let more = offset.saturating_add(RESERVED);
            let mut told = TopicPartitionList::new();
            let done = add(&mut told, &mine.topic, mine.partition, floor, more)
                .and_then(|()| self.consumer.commit(&told, CommitMode::Sync));
            done.map_err(|error| self.why(&error))?;
            self.session.committed(mine.number, floor, Some(more));
        }
        let (id, received) = record::received(message);
        let taken =
            Taken { partition: mine.number, offset, redelivered: offset < mine.known_before, id, message: received };
        self.session.arrived(taken);
        Ok(())
    }

    /// Tells the group what was settled.
    fn commit(&mut self, mode: CommitMode) {
        self.last_commit = Instant::now();
        let again = std::mem::take(&mut *lock(&self.consumer.context().commit_failed));
        let mut told = TopicPartitionList::new();
        let mut floors = HashMap::new();
        for mine in &self.mine {
            if let Some((floor, reserved)) = self.session.to_commit(mine.number, again)
                && add(&mut told, &mine.topic, mine.partition, floor, reserved).is_ok()
            {
                floors.insert(mine.number, floor);
            }
        }
        if floors.is_empty() {
            return;
        }
        match self.consumer.commit(&told, mode) {
            Ok(()) => floors.into_iter().for_each(|(number, floor)| self.session.committed(number, floor, None)),
            // What was settled comes again if this session ends before the next try.
            Err(error) => tracing::debug!("the group could not be told what was settled: {error}"),
        }
    }

    /// An empty topic brings no sign that a broker is there again.
    fn look_whether_a_broker_is_back(&mut self) {
        if self.session.watcher.down().is_none() {
            self.asked = None;
            return;
        }
        if self.asked.is_some_and(|asked| asked.elapsed() < ASKED_EVERY) {
            return;
        }
        let topic = self.options.topics.first().map(String::as_str);
        if self.consumer.fetch_metadata(topic, ASKED_EVERY).is_ok() {
            self.session.watcher.is_up();
        }
        self.asked = Some(Instant::now());
        // A receiver that waits has to hear of it.
        self.session.told();
    }
}

fn add(
    list: &mut TopicPartitionList,
    topic: &str,
    partition: i32,
    offset: i64,
    reserved: i64,
) -> Result<(), KafkaError> {
    let mut element = list.add_partition(topic, partition);
    element.set_offset(Offset::Offset(offset))?;
    element.set_metadata(progress::metadata(reserved));
    Ok(())
}

/// What a refusal means for whoever set this up.
fn about(code: Code, what: &str, group: &str) -> String {
    match code {
        Code::TopicAuthorizationFailed => format!("the user may not read {what}; give it READ and DESCRIBE there"),
        Code::GroupAuthorizationFailed => {
            format!("the user may not receive in group {group:?}; give it READ on the group")
        }
        Code::InconsistentGroupProtocol => format!(
            "group {group:?} has members of another program, which share partitions out in another way; name another group"
        ),
        _ => format!("{what}: {code}"),
    }
}
