//! A member of a consumer group, on a thread of its own: the client library asks for partitions to be taken and given back while it is polled,
//! and waits for the brokers in some of its calls.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex as StdMutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, RebalanceProtocol};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::{BorrowedMessage, Message as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::address::Address;
use super::anchors::{Anchors, Looked};
use super::client;
use super::context::{Change, Context, lock};
use super::offsets;
use super::progress::{self, Anchor, Begin, Committed, Note, Told};
use super::record;
use super::subscription::{KafkaSubscriptionOptions, Reserved, Session};
use crate::deliveries::Taken;

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
/// What each of many partitions gets, when the others have taken long.
const LEAST: Duration = Duration::from_millis(100);
/// So often it is looked whether partitions still have what was received of them.
const LOOKED_EVERY: Duration = Duration::from_secs(10);
/// And whether topics are there that were missing.
const MISSING_EVERY: Duration = Duration::from_secs(5);

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

/// One partition that this member has.
struct Mine {
    topic: String,
    partition: i32,
    /// What the session calls it.
    number: u32,
    known_before: i64,
    /// A record of it that was there at the last look, and the last one that was read.
    anchor: Option<Anchor>,
    latest: Option<Anchor>,
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
    config
        .set("queued.max.messages.kbytes", "256")
        .set("fetch.message.max.bytes", "262144")
        .set("queued.min.messages", "10000");
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
        anchors: Anchors::new(address, &options.group),
        looked: Instant::now(),
        missing: Vec::new(),
        missing_looked: Instant::now(),
        is_any_missing: Cell::new(false),
    };
    let worked = member.work();
    if let Err(problem) = &worked {
        // Before it takes its leave, which may take a while.
        session.ended(problem.clone());
    }
    // Whoever is next begins behind what was settled.
    member.commit(CommitMode::Sync);
    worked
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        // They keep the consumer.
        self.mine.clear();
        let context = self.consumer.context();
        *lock(&context.closing) = true;
        // The library does not close before each change is answered.
        for change in std::mem::take(&mut *lock(&context.changes)) {
            let _ = match change {
                Change::Assigned(partitions) => self.consumer.incremental_assign(&partitions),
                Change::Revoked(partitions) => self.consumer.incremental_unassign(&partitions),
            };
        }
    }
}

struct Member<'a> {
    session: &'a Arc<Session>,
    options: &'a KafkaSubscriptionOptions,
    consumer: Arc<BaseConsumer<Context>>,
    mine: Vec<Mine>,
    last_commit: Instant,
    /// When a broker was asked last, while none is there.
    asked: Option<Instant>,
    anchors: Anchors,
    looked: Instant,
    /// Topics that do not exist.
    missing: Vec<String>,
    missing_looked: Instant,
    /// The library said so, and not which.
    is_any_missing: Cell<bool>,
}

impl Member<'_> {
    fn work(&mut self) -> Result<(), String> {
        self.topics()?;
        self.is_ours()?;
        let topics: Vec<&str> = self.options.topics.iter().map(String::as_str).collect();
        self.consumer.subscribe(&topics).map_err(|error| error.to_string())?;
        while self.session.is_wanted() {
            self.hear()?;
            let any = self.fetch()?;
            if self.last_commit.elapsed() >= COMMITTED_EVERY {
                self.commit(CommitMode::Async);
            }
            self.look_whether_a_broker_is_back();
            self.look_for_missing_topics()?;
            if self.looked.elapsed() >= LOOKED_EVERY && self.session.watcher.down().is_none() {
                self.look_at_anchors()?;
            }
            if !any {
                self.session.alarm.wait(POLLED_EVERY);
            }
        }
        Ok(())
    }

    /// Looks which topics are missing: subscribing to one that does not exist is no error for the library. One that is there is received
    /// all the same.
    fn topics(&mut self) -> Result<(), String> {
        let mut missing = Vec::new();
        for topic in &self.options.topics {
            if !self.is_there(topic)? {
                missing.push(topic.clone());
            }
        }
        self.missing_looked = Instant::now();
        self.session.watcher.is_up();
        if missing.len() == self.options.topics.len() {
            return Err(missing.iter().map(|topic| record::no_such_topic(topic)).collect::<Vec<_>>().join("; "));
        }
        for topic in missing.iter().filter(|topic| !self.missing.contains(topic)) {
            tracing::warn!(
                "{}; group {:?} receives from its other topics",
                record::no_such_topic(topic),
                self.options.group
            );
        }
        let problem = missing.first().map(|topic| record::no_such_topic(topic));
        self.session.problem(problem);
        self.missing = missing;
        Ok(())
    }

    /// Whether another consumer has received in this group.
    fn is_ours(&self) -> Result<(), String> {
        let failed = |error: KafkaError| self.why(&error);
        let mut partitions = TopicPartitionList::new();
        for topic in self.options.topics.iter().filter(|topic| !self.missing.contains(topic)) {
            let metadata = self.consumer.fetch_metadata(Some(topic), ANSWERS_WITHIN).map_err(failed)?;
            for found in metadata.topics() {
                for partition in found.partitions() {
                    partitions.add_partition(found.name(), partition.id());
                }
            }
        }
        let committed = self.committed(&partitions).map_err(failed)?;
        let mut notes = committed.elements().into_iter().filter_map(|element| offsets::note(&element));
        notes.try_for_each(|note| self.belongs(&note))
    }

    /// What the group has committed. The broker that keeps the group may be just beginning to.
    fn committed(&self, partitions: &TopicPartitionList) -> Result<TopicPartitionList, KafkaError> {
        let since = Instant::now();
        loop {
            let found = self.consumer.committed_offsets(partitions.clone(), ANSWERS_WITHIN);
            let code = found.as_ref().err().and_then(KafkaError::rdkafka_error_code);
            let is_beginning = matches!(
                code,
                Some(Code::CoordinatorLoadInProgress | Code::CoordinatorNotAvailable | Code::NotCoordinator)
            );
            if !is_beginning || since.elapsed() >= ANSWERS_WITHIN || !self.session.is_wanted() {
                return found;
            }
            self.session.alarm.wait(POLLED_EVERY);
        }
    }

    fn belongs(&self, note: &Note) -> Result<(), String> {
        let (group, ours) = (&self.options.group, &self.options.consumer);
        match note.consumer.is_empty() || ours.is_empty() || note.consumer == *ours {
            true => Ok(()),
            false => Err(format!(
                "group {group:?} is that of consumer {:?}, and each of the two would get a part of the messages; name another group",
                note.consumer
            )),
        }
    }

    fn is_there(&self, topic: &str) -> Result<bool, String> {
        let since = Instant::now();
        let metadata = loop {
            match self.consumer.fetch_metadata(Some(topic), ASKED_EVERY) {
                Ok(metadata) => break metadata,
                Err(error) => {
                    // The reason is heard while the library is polled.
                    self.consumer.poll(Duration::ZERO);
                    if self.session.watcher.down().is_some()
                        || since.elapsed() >= ANSWERS_WITHIN
                        || !self.session.is_wanted()
                    {
                        return Err(self.why(&error));
                    }
                }
            }
        };
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        match found.and_then(|found| found.error()).map(Code::from) {
            Some(Code::UnknownTopicOrPartition | Code::UnknownTopic) => Ok(false),
            Some(code) => Err(about(code, &format!("topic {topic:?}"), &self.options.group)),
            None => Ok(true),
        }
    }

    fn look_for_missing_topics(&mut self) -> Result<(), String> {
        let is_due = self.is_any_missing.get() || !self.missing.is_empty();
        if !is_due || self.missing_looked.elapsed() < MISSING_EVERY || self.session.watcher.down().is_some() {
            return Ok(());
        }
        self.is_any_missing.set(false);
        let before = self.missing.len();
        self.topics()?;
        if self.missing.len() < before {
            // The library would notice within a minute.
            let topics: Vec<&str> = self.options.topics.iter().map(String::as_str).collect();
            self.consumer.subscribe(&topics).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Whether each partition still has the record that was there at the last look. Kafka does not say that a topic was made anew: reading goes
    /// on at the old place, past messages that nobody has received.
    fn look_at_anchors(&mut self) -> Result<(), String> {
        let wanted: Vec<(&str, i32, Anchor)> =
            self.mine.iter().filter_map(|mine| Some((mine.topic.as_str(), mine.partition, mine.anchor?))).collect();
        let Looked { others, same, gone } = self.anchors.look(&wanted);
        self.looked = Instant::now();
        for (topic, partition) in &others {
            self.begin_anew(topic, *partition)?;
        }
        if let Some((topic, partition)) = others.first() {
            return Err(format!("partition {partition} of topic {topic:?} was made anew, or has lost its end"));
        }
        let is_among = |which: &[(String, i32)], mine: &Mine| {
            which.iter().any(|(topic, partition)| mine.partition == *partition && mine.topic == *topic)
        };
        // One that could not be looked at keeps its record for the next time.
        for mine in &mut self.mine {
            if is_among(&same, mine) {
                mine.anchor = mine.latest.or(mine.anchor);
            } else if is_among(&gone, mine) {
                let old = mine.anchor.map_or(-1, |anchor| anchor.offset);
                mine.anchor = mine.latest.filter(|latest| latest.offset > old);
            }
        }
        Ok(())
    }

    /// The next session begins at the first message of this partition.
    fn begin_anew(&mut self, topic: &str, partition: i32) -> Result<(), String> {
        let (low, high) =
            self.consumer.fetch_watermarks(topic, partition, ANSWERS_WITHIN).map_err(|error| self.why(&error))?;
        tracing::warn!(
            "partition {partition} of topic {topic:?} does not have what group {:?} has received of it: the topic was made anew or went back; it is \
             received again from its beginning, and an inbox recognises what it had",
            self.options.group
        );
        let note = Note { reserved: high, anchor: None, consumer: self.options.consumer.clone() };
        let mut told = TopicPartitionList::new();
        let done = offsets::add(&mut told, topic, partition, low, &note)
            .and_then(|()| self.consumer.commit(&told, CommitMode::Sync));
        done.map_err(|error| self.why(&error))?;
        // What was settled of the old one says nothing of the new one.
        self.mine.retain(|mine| mine.topic != topic || mine.partition != partition);
        Ok(())
    }

    fn why(&self, error: &KafkaError) -> String {
        self.session.watcher.down().or_else(|| self.session.watcher.last()).unwrap_or_else(|| error.to_string())
    }

    /// What the group asks for, and what went wrong.
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
        loop {
            let next = lock(&self.consumer.context().changes).first().cloned();
            match next {
                None => return Ok(()),
                Some(Change::Assigned(partitions)) => self.take(&partitions)?,
                Some(Change::Revoked(partitions)) => self.give_back(&partitions)?,
            }
            // One that failed stays, and is answered at the end.
            lock(&self.consumer.context().changes).remove(0);
        }
    }

    /// An error that the library does not get over by itself ends the session.
    fn failed(&self, error: &KafkaError) -> Result<(), String> {
        let (KafkaError::MessageConsumption(code) | KafkaError::MessageConsumptionFatal(code)) = error else {
            tracing::debug!("the Kafka client says: {error}");
            return Ok(());
        };
        match code {
            // Which one it is is looked for.
            Code::UnknownTopicOrPartition | Code::UnknownTopic => {
                self.is_any_missing.set(true);
                Ok(())
            }
            Code::TopicAuthorizationFailed
            | Code::GroupAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::InconsistentGroupProtocol => Err(about(*code, "the topics", &self.options.group)),
            Code::AutoOffsetReset | Code::OffsetOutOfRange => Err(
                "what comes next was removed from a partition, or the partition was made anew; looking where to go on"
                    .to_owned(),
            ),
            Code::Fenced | Code::FencedInstanceId | Code::Fatal => Err(error.to_string()),
            // The library would go on behind it, and what it skips would be committed.
            Code::BadMessage
            | Code::BadCompression
            | Code::NotImplemented
            | Code::InvalidMessage
            | Code::MessageSizeTooLarge => {
                Err(format!("a batch of a partition cannot be read, and nothing behind it is received: {error}"))
            }
            _ => {
                tracing::debug!("the Kafka client has trouble: {error}");
                Ok(())
            }
        }
    }

    /// Takes partitions, each from where the group stands.
    fn take(&mut self, partitions: &TopicPartitionList) -> Result<(), String> {
        let watcher = self.session.watcher.clone();
        let failed = |error: KafkaError| watcher.down().or_else(|| watcher.last()).unwrap_or_else(|| error.to_string());
        let committed = self.committed(partitions).map_err(&failed)?;
        let since = Instant::now();
        let mut found: Vec<(String, i32, Option<Committed>, i64, i64)> = Vec::new();
        for element in committed.elements() {
            element.error().map_err(&failed)?;
            let (topic, partition) = (element.topic().to_owned(), element.partition());
            let committed = match element.offset() {
                Offset::Offset(offset) => Some(Committed { offset, note: offsets::note(&element) }),
                _ => None,
            };
            if let Some(note) = committed.as_ref().and_then(|committed| committed.note.as_ref()) {
                self.belongs(note)?;
            }
            let within = ANSWERS_WITHIN.saturating_sub(since.elapsed()).max(LEAST);
            let (low, high) = match self.consumer.fetch_watermarks(&topic, partition, within) {
                Ok(ends) => ends,
                // Nobody leads it now: it goes on where it stands as soon as somebody does, and keeps nobody from the others.
                Err(error) if committed.is_some() => {
                    tracing::warn!("the ends of partition {partition} of topic {topic:?} cannot be seen now: {error}");
                    (0, i64::MAX)
                }
                Err(error) => return Err(failed(error)),
            };
            found.push((topic, partition, committed, low, high));
        }
        let anchor_of = |committed: &Option<Committed>| committed.as_ref()?.note.as_ref()?.anchor;
        let wanted: Vec<(&str, i32, Anchor)> = found
            .iter()
            .filter_map(|(topic, partition, committed, low, high)| {
                let anchor = anchor_of(committed)?;
                (*low..*high).contains(&anchor.offset).then_some((topic.as_str(), *partition, anchor))
            })
            .filter(|(topic, partition, _)| {
                found
                    .iter()
                    .any(|(found, number, _, _, high)| found == topic && number == partition && *high < i64::MAX)
            })
            .collect();
        let others = self.anchors.look(&wanted).others;
        let mut begins = Vec::new();
        for (topic, partition, committed, low, high) in found {
            let mut anchor = anchor_of(&committed).filter(|anchor| anchor.offset >= low);
            let mut begin = progress::begin(committed.as_ref(), low, high);
            let is_another = anchor.is_some_and(|anchor| anchor.offset >= high)
                || others.iter().any(|(other, number)| *other == topic && *number == partition);
            if let (None, true, Some(committed)) = (&begin.told, is_another, &committed) {
                let told = Some(Told::WentBack { received: committed.offset, end: high });
                begin = Begin { offset: low, known_before: high, told };
            }
            if begin.told.is_some() {
                anchor = None;
            }
            self.tell(&topic, partition, &begin);
            begins.push((topic, partition, begin, anchor));
        }
        let mut told = TopicPartitionList::new();
        for (topic, partition, begin, anchor) in &begins {
            let note = self.note(begin.offset.saturating_add(RESERVED), *anchor);
            offsets::add(&mut told, topic, *partition, begin.offset, &note).map_err(&failed)?;
        }
        if !begins.is_empty() {
            self.consumer.commit(&told, CommitMode::Sync).map_err(&failed)?;
        }
        let mut assigned = TopicPartitionList::new();
        for (topic, partition, Begin { offset, known_before, .. }, anchor) in begins {
            let added = assigned.add_partition_offset(&topic, partition, Offset::Offset(offset));
            added.map_err(|error| error.to_string())?;
            // Before anything is fetched, so that nothing of it goes into the common queue.
            let queue = self.consumer.split_partition_queue(&topic, partition);
            let mut queue = queue.ok_or_else(|| format!("partition {partition} of topic {topic:?} has no queue"))?;
            let session = self.session.clone();
            queue.set_nonempty_callback(move || session.alarm.ring());
            let number = self.session.begin(offset, offset.saturating_add(RESERVED));
            self.mine.push(Mine { topic, partition, number, known_before, anchor, latest: None, queue });
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
                "up to {count} messages of partition {partition} of topic {topic:?} were removed from Kafka before group {group:?} received them \
                 (offsets without a message, such as the marks of transactions, are counted too): they are lost unless they were received in another way; compare with \
                 `postroom reconcile`, and keep messages for longer (retention.ms, retention.bytes)"
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
        let mut seen: Vec<(usize, Anchor)> = Vec::new();
        let mut first = 0;
        let mut work = || -> Result<(), String> {
            for (index, mine) in self.mine.iter().enumerate() {
                for taken in 0..AT_ONCE {
                    if !self.session.has_room() {
                        // Whoever did not have a turn is first the next time: a backlog of some must not keep out the others.
                        first = index + usize::from(taken > 0);
                        return Ok(());
                    }
                    let Reserved { floor, reserved, next } = self.session.reserved(mine.number);
                    if next >= reserved && !self.reserve(mine, floor, next.saturating_add(RESERVED))? {
                        break;
                    }
                    match mine.queue.poll(Duration::ZERO) {
                        None => break,
                        Some(Err(error)) => self.failed(&error)?,
                        Some(Ok(message)) => {
                            self.hand_out(mine, &message)?;
                            let anchor = Anchor { offset: message.offset(), print: record::print(&message) };
                            match seen.last_mut() {
                                Some((last, found)) if *last == index => *found = anchor,
                                _ => seen.push((index, anchor)),
                            }
                        }
                    }
                }
            }
            Ok(())
        };
        let worked = work();
        let any = !seen.is_empty();
        for (index, anchor) in seen {
            if let Some(mine) = self.mine.get_mut(index) {
                mine.latest = Some(anchor);
                mine.anchor.get_or_insert(anchor);
            }
        }
        let turns = self.mine.len().max(1);
        self.mine.rotate_left(first % turns);
        worked.map(|()| any)
    }

    /// Tells the group that more may be handed out. False: not now, because partitions are being shared out.
    fn reserve(&self, mine: &Mine, floor: i64, more: i64) -> Result<bool, String> {
        let mut told = TopicPartitionList::new();
        let done = offsets::add(&mut told, &mine.topic, mine.partition, floor, &self.note(more, mine.anchor))
            .and_then(|()| self.consumer.commit(&told, CommitMode::Sync));
        match done {
            Ok(()) => {
                self.session.committed(mine.number, floor, Some(more));
                Ok(true)
            }
            Err(KafkaError::ConsumerCommit(Code::RebalanceInProgress | Code::IllegalGeneration)) => Ok(false),
            Err(error) => Err(self.why(&error)),
        }
    }

    fn hand_out(&self, mine: &Mine, message: &BorrowedMessage<'_>) -> Result<(), String> {
        let offset = message.offset();
        let Reserved { floor, reserved, .. } = self.session.reserved(mine.number);
        // Behind a gap; it was seen to before the message was taken otherwise.
        if offset >= reserved && !self.reserve(mine, floor, offset.saturating_add(RESERVED))? {
            return Err("partitions are being shared out anew".to_owned());
        }
        let (id, received) = record::received(message);
        let (partition, next) = (mine.number, offset.saturating_add(1));
        let redelivered = offset < mine.known_before;
        let taken = Taken { partition, place: offset, next, redelivered, id, message: received };
        self.session.arrived(taken);
        Ok(())
    }

    fn note(&self, reserved: i64, anchor: Option<Anchor>) -> Note {
        Note { reserved, anchor, consumer: self.options.consumer.clone() }
    }

    /// Tells the group what was settled.
    fn commit(&mut self, mode: CommitMode) {
        self.last_commit = Instant::now();
        let again = std::mem::take(&mut *lock(&self.consumer.context().commit_failed));
        let mut told = TopicPartitionList::new();
        let mut floors = HashMap::new();
        for mine in &self.mine {
            if let Some((floor, reserved)) = self.session.to_commit(mine.number, again)
                && offsets::add(&mut told, &mine.topic, mine.partition, floor, &self.note(reserved, mine.anchor))
                    .is_ok()
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
