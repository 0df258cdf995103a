//! Publishing exactly once: the messages of each lane in transactions of a producer of their own, each of which also lists them in a ledger.
//!
//! The brokers accept one producer of a transactional id, the one that began last, and end what an older one left open before it begins. It
//! then reads what the ledger lists, and so knows every message that was stored: before it nobody else publishes, and behind it nobody does.
//! <https://cwiki.apache.org/confluence/display/KAFKA/KIP-98+-+Exactly+Once+Delivery+and+Transactional+Messaging>

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use postroom::{Batch, BoxError, FailureKind, LANES_DEFAULT, Sink, SinkLimits, Unavailable, Verdict, Verdicts};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::producer::{FutureRecord, Producer as _};
use tokio::sync::{Mutex, MutexGuard, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout, timeout_at};

use super::client::{self, Producer, Watcher};
use super::ledger::{self, Entry, Stored};
use super::sink::{GRACE, KafkaSink, end, is_about_a_batch, send, verdict};
use super::topics::{Topic, Topics};
use super::{ExactlyOnce, KafkaOptions, Opened, address, record};
use crate::OpenSinkError;

/// A lane has so long to begin at least.
const ENTERED_WITHIN_LEAST: Duration = Duration::from_secs(10);

/// Publishes to topics of one cluster, each message once for readers of committed messages.
pub struct KafkaTransactionsSink {
    options: KafkaOptions,
    opened: Opened,
    exactly_once: ExactlyOnce,
    shown: String,
    turns: Semaphore,
    watcher: Watcher,
    topics: Topics,
    lanes: StdMutex<HashMap<u16, Arc<Mutex<Lane>>>>,
    /// Only looks whether the brokers are there.
    plain: KafkaSink,
}

/// A lane as this process knows it.
#[derive(Default)]
struct Lane {
    /// Begun, and as far as is known not refused.
    producer: Option<Arc<Producer>>,
    /// Of the ledger.
    partition: i32,
    stored: Stored,
    /// A transaction was begun, and its end was not seen.
    in_doubt: bool,
}

/// A message of a batch by its place, with its topic.
type Chosen = (usize, String);

/// What became of a transaction.
enum Ended {
    Committed,
    /// Nothing of it is stored, because of these messages.
    Refused(Vec<(usize, Verdict)>),
    /// Nothing of it is stored, because of one of them that the brokers did not name.
    Unclear,
    /// Nothing of it is stored: ending the transaction before, the client took some of these out of its queue as well.
    Purged,
    /// The producer is of no use any more.
    InDoubt(String),
}

impl KafkaTransactionsSink {
    /// Checks the options; connects with the first probe or batch.
    pub fn new(options: KafkaOptions) -> Result<Self, OpenSinkError> {
        let wrong = |problem| OpenSinkError { kind: "kafka", problem };
        let opened = options.opened().map_err(wrong)?;
        let exactly_once = opened.exactly_once.clone();
        let exactly_once = exactly_once.ok_or_else(|| wrong("transactional_id and ledger are missing".to_owned()))?;
        let turns = Semaphore::new(options.batches_in_flight_max);
        let shown = address::shown(&options.url);
        let plain = KafkaSink::new(options.clone())?;
        let (watcher, topics, lanes) = (Watcher::default(), Topics::default(), StdMutex::default());
        Ok(Self { options, opened, exactly_once, shown, turns, watcher, topics, lanes, plain })
    }

    fn unavailable(&self, error: impl Into<BoxError>) -> Unavailable {
        Unavailable::new(format!("Kafka at {}", self.shown), error)
    }

    fn deadline(&self) -> Duration {
        Duration::from_secs(self.options.publish_deadline_seconds)
    }

    fn lane(&self, number: u16) -> Arc<Mutex<Lane>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner).entry(number).or_default().clone()
    }

    fn transactional_id(&self, lane: u16) -> String {
        format!("{}-{lane}", self.exactly_once.transactional_id)
    }

    /// The producer of a lane. A new one refuses the older one, whoever has it, and then knows what that has stored.
    async fn entered(
        &self,
        number: u16,
        lane: &mut MutexGuard<'_, Lane>,
        by: Instant,
    ) -> Result<Arc<Producer>, Unavailable> {
        if lane.in_doubt {
            leave(lane);
        }
        if let Some(producer) = &lane.producer {
            return Ok(producer.clone());
        }
        let id = self.transactional_id(number);
        let made = client::transactional(&self.opened.address, &self.options, self.watcher.clone(), &id);
        let producer = Arc::new(made.map_err(|error| self.unavailable(error))?);
        let entered = self.enter(number, &producer, id, by).await;
        match entered {
            Ok((partition, stored)) => {
                (lane.partition, lane.stored, lane.producer) = (partition, stored, Some(producer.clone()));
                self.watcher.is_up();
                Ok(producer)
            }
            Err(problem) => {
                end(producer);
                Err(self.unavailable(self.watcher.down().unwrap_or(problem)))
            }
        }
    }

    /// The lane's partition of the ledger, and what it lists.
    async fn enter(
        &self,
        number: u16,
        producer: &Arc<Producer>,
        id: String,
        by: Instant,
    ) -> Result<(i32, Stored), String> {
        let within = by.saturating_duration_since(Instant::now()).max(ENTERED_WITHIN_LEAST);
        let topic = self.exactly_once.ledger.clone();
        let partitions = match self.topics.find(producer, &topic, within).await? {
            Topic::There(partitions) => i32::try_from(partitions).unwrap_or(i32::MAX).max(1),
            Topic::Missing => return Err(no_ledger(&topic)),
            Topic::Hidden => {
                return Err(format!(
                    "the user may not see the ledger {topic:?}; give it READ, WRITE and DESCRIBE there"
                ));
            }
        };
        // A lane keeps its partition when the ledger gets more of them.
        let partition = i32::from(number);
        if partition >= partitions {
            return Err(format!(
                "the ledger, topic {topic:?}, has {partitions} partitions, and a lane of this outbox is its number {number}, counted from 0: give it a partition \
                 for each lane (kafka-topics.sh --alter --topic {topic} --partitions …)"
            ));
        }
        let (begun, address) = (producer.clone(), self.opened.address.clone());
        let entering = spawn_blocking(move || {
            let until = Instant::now() + within;
            let begun = begun.init_transactions(within);
            begun.map_err(|error| format!("begin transactions as {id:?}: {error}; {}", advice(&error, &id)))?;
            let left = until.saturating_duration_since(Instant::now());
            Ok((partition, ledger::last(&address, (&topic, partition), &id, left)?))
        });
        match timeout(within + GRACE, entering).await {
            Ok(Ok(stored)) => stored,
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("its client does not answer".to_owned()),
        }
    }

    /// Publishes what a batch has of one lane.
    async fn publish_lane(
        &self,
        number: u16,
        batch: &Batch,
        places: &[usize],
        by: Instant,
    ) -> Result<Vec<(usize, Verdict)>, Unavailable> {
        let lane = self.lane(number);
        let Ok(mut lane) = timeout_at(by, lane.lock()).await else { return Ok(Vec::new()) };
        let is_new = lane.producer.is_none() || lane.in_doubt;
        let producer = self.entered(number, &mut lane, by).await?;
        // Beginning takes time of its own.
        let by = if is_new { Instant::now() + self.deadline() } else { by };
        let mut judged = Vec::with_capacity(places.len());
        // Nothing of a key is sent behind one that is not.
        let mut left_behind = HashSet::<&str>::new();
        let mut chosen = Vec::<Chosen>::with_capacity(places.len());
        for place in places.iter().copied() {
            let (Some(message), Some(way)) = (batch.messages().get(place), batch.ways().get(place)) else { continue };
            let topic = record::topic(&self.opened.topic, message);
            if topic.as_ref().is_ok_and(|topic| lane.stored.has(&Entry::of(message.id, way, topic))) {
                judged.push((place, Verdict::Stored));
                continue;
            }
            let key = message.ordering_key();
            if key.is_some_and(|key| left_behind.contains(key)) {
                judged.push((place, Verdict::NotSent));
                continue;
            }
            let refused = match topic {
                Err(reason) => Verdict::failed(FailureKind::Permanent, reason),
                Ok(topic) if topic == self.exactly_once.ledger => {
                    Verdict::failed(FailureKind::Permanent, format!("topic {topic:?} is the ledger of this route"))
                }
                Ok(topic) => match self.topics.find(&producer, &topic, self.deadline()).await {
                    Ok(Topic::Missing) => Verdict::failed(FailureKind::Transient, record::no_such_topic(&topic)),
                    Ok(_) => {
                        chosen.push((place, topic));
                        continue;
                    }
                    Err(problem) => return Err(self.unavailable(self.watcher.down().unwrap_or(problem))),
                },
            };
            left_behind.extend(key);
            judged.push((place, refused));
        }
        let (mut rounds, mut purged) = (VecDeque::from([chosen]), 0);
        while let Some(mut round) = rounds.pop_front() {
            let key = |place: usize| batch.messages().get(place).and_then(|message| message.ordering_key());
            round.retain(|(place, _)| {
                let is_behind = key(*place).is_some_and(|key| left_behind.contains(key));
                judged.extend(is_behind.then_some((*place, Verdict::NotSent)));
                !is_behind
            });
            if round.is_empty() || Instant::now() >= by {
                continue;
            }
            lane.in_doubt = true;
            let ended = self.transaction((number, lane.partition), &producer, batch, &round, by).await;
            lane.in_doubt = matches!(ended, Ended::InDoubt(_));
            purged = if matches!(ended, Ended::Purged) { purged + 1 } else { 0 };
            match ended {
                Ended::Committed => {
                    entries(batch, &round).for_each(|entry| lane.stored.add(entry));
                    judged.extend(round.into_iter().map(|(place, _)| (place, Verdict::Stored)));
                    self.watcher.is_up();
                }
                Ended::Refused(refused) => {
                    left_behind.extend(refused.iter().filter_map(|(place, _)| key(*place)));
                    round.retain(|(place, _)| !refused.iter().any(|(other, _)| other == place));
                    judged.extend(refused);
                    rounds.push_front(round);
                }
                // Once it was the client alone. Else the brokers take one of them, or the ledger, into no transaction.
                Ended::Purged if purged < 2 => rounds.push_front(round),
                Ended::Purged if round.len() == 1 => {
                    left_behind.extend(round.iter().filter_map(|(place, _)| key(*place)));
                    judged.extend(round.into_iter().map(|(place, topic)| {
                        let reason = format!(
                            "the brokers take it into no transaction; the user needs WRITE on topic {topic:?} and on the ledger {:?}",
                            self.exactly_once.ledger
                        );
                        (place, Verdict::failed(FailureKind::Busy, reason))
                    }));
                    purged = 0;
                }
                Ended::Unclear | Ended::Purged => {
                    purged = 0;
                    let second = round.split_off(round.len() / 2);
                    rounds.push_front(second);
                    rounds.push_front(round);
                }
                Ended::InDoubt(why) => {
                    // What was known of topics may not be so any more.
                    self.topics.ask_again();
                    leave(&mut lane);
                    let rest = round.into_iter().chain(rounds.drain(..).flatten());
                    judged.extend(rest.map(|(place, _)| (place, Verdict::Unknown(why.clone()))));
                }
            }
        }
        Ok(judged)
    }

    /// Stores these, and that they are stored, or nothing.
    async fn transaction(
        &self,
        (number, partition): (u16, i32),
        producer: &Arc<Producer>,
        batch: &Batch,
        round: &[Chosen],
        by: Instant,
    ) -> Ended {
        let id = self.transactional_id(number);
        if let Err(error) = producer.begin_transaction() {
            return Ended::InDoubt(ended_early(&error, &id));
        }
        let ledger = &self.exactly_once.ledger;
        let listed = ledger::written(&id, entries(batch, round));
        let listed = FutureRecord::<[u8], [u8]>::to(ledger).partition(partition).payload(&listed);
        let mut reports = Vec::with_capacity(round.len() + 1);
        let mut refused = Vec::new();
        match producer.send_result(listed) {
            Ok(report) => reports.push(report),
            Err((error, _)) => return Ended::InDoubt(error.to_string()),
        }
        for (place, topic) in round {
            let Some(message) = batch.messages().get(*place) else { continue };
            match send(producer, topic, message, self.opened.events.as_ref()) {
                Ok(report) => reports.push(report),
                // Of the client itself, about this message.
                Err(error) => match verdict(&error, topic, true) {
                    Verdict::Failed(failure) => refused.push((*place, Verdict::Failed(failure))),
                    _ => return Ended::InDoubt(error.to_string()),
                },
            }
        }
        if !refused.is_empty() {
            return self.aborted(producer, Ended::Refused(refused)).await;
        }
        let Ok(mut reported) = timeout_at(by + GRACE, join_all(reports)).await else {
            return Ended::InDoubt("its client reported nothing within the deadline".to_owned());
        };
        if let Ok(Err((error, _))) = reported.remove(0) {
            let about = verdict(&error, ledger, true);
            if let Verdict::Failed(failure) = about {
                return Ended::InDoubt(format!("the ledger: {}", failure.reason));
            }
        }
        let (mut unclear, mut purged, mut problem) = (false, false, None);
        for ((place, topic), report) in round.iter().zip(reported) {
            let error = match report {
                Ok(Ok(_)) => continue,
                Ok(Err((error, _))) => error,
                Err(_) => return Ended::InDoubt("the producer was ended before it was reported".to_owned()),
            };
            match verdict(&error, topic, round.len() == 1) {
                Verdict::Failed(failure) => refused.push((*place, Verdict::Failed(failure))),
                _ if error.rdkafka_error_code().is_some_and(is_about_a_batch) => unclear = true,
                _ if error.rdkafka_error_code() == Some(Code::PurgeQueue) => purged = true,
                _ => problem = Some(error.to_string()),
            }
        }
        if !refused.is_empty() {
            self.aborted(producer, Ended::Refused(refused)).await
        } else if unclear {
            self.aborted(producer, Ended::Unclear).await
        } else if purged && problem.is_none() {
            self.aborted(producer, Ended::Purged).await
        } else if let Some(problem) = problem {
            Ended::InDoubt(self.watcher.down().unwrap_or(problem))
        } else {
            let committing = producer.clone();
            let within = by.saturating_duration_since(Instant::now()).max(GRACE);
            let committed = spawn_blocking(move || committing.commit_transaction(within));
            match timeout(within + GRACE, committed).await {
                Ok(Ok(Ok(()))) => Ended::Committed,
                Ok(Ok(Err(error))) => Ended::InDoubt(ended_early(&error, &id)),
                Ok(Err(error)) => Ended::InDoubt(error.to_string()),
                Err(_) => Ended::InDoubt("its client does not answer".to_owned()),
            }
        }
    }

    /// `ended` if nothing of the transaction is stored.
    async fn aborted(&self, producer: &Arc<Producer>, ended: Ended) -> Ended {
        let aborting = producer.clone();
        let aborted = spawn_blocking(move || aborting.abort_transaction(GRACE * 2));
        match timeout(GRACE * 3, aborted).await {
            Ok(Ok(Ok(()))) => ended,
            Ok(Ok(Err(error))) => Ended::InDoubt(error.to_string()),
            Ok(Err(error)) => Ended::InDoubt(error.to_string()),
            Err(_) => Ended::InDoubt("its client does not answer".to_owned()),
        }
    }
}

/// What the ledger lists of these.
fn entries(batch: &Batch, round: &[Chosen]) -> impl Iterator<Item = Entry> {
    round.iter().filter_map(|(place, topic)| {
        let (message, way) = (batch.messages().get(*place)?, batch.ways().get(*place)?);
        Some(Entry::of(message.id, way, topic))
    })
}

/// The next one begins anew, and finds in the ledger what this one has stored.
fn leave(lane: &mut Lane) {
    lane.in_doubt = false;
    lane.producer.take().into_iter().for_each(end);
}

/// What to do where transactions cannot be begun.
pub(super) fn advice(error: &KafkaError, id: &str) -> String {
    match error.rdkafka_error_code() {
        Some(Code::TransactionalIdAuthorizationFailed) => {
            let prefix = id.rsplit_once('-').map_or(id, |(prefix, _)| prefix);
            format!(
                "give the user WRITE and DESCRIBE on the transactional ids: kafka-acls.sh --add --operation WRITE --operation DESCRIBE \
                 --transactional-id {prefix}- --resource-pattern-type prefixed --allow-principal User:NAME"
            )
        }
        Some(Code::OperationTimedOut) => {
            "look whether the brokers can be reached, and whether there are as many as transaction.state.log.replication.factor says".to_owned()
        }
        _ => "correct the section in the configuration".to_owned(),
    }
}

fn ended_early(error: &KafkaError, id: &str) -> String {
    let is_refused =
        matches!(error.rdkafka_error_code(), Some(Code::Fenced | Code::ProducerFenced | Code::InvalidProducerEpoch));
    if is_refused {
        return format!(
            "the brokers refuse the producer {id:?}: another relay has taken the lane, its transaction was open for too long, or another route has the same transactional_id"
        );
    }
    format!("the transaction did not end as it should: {error}")
}

/// Why nothing can be published without it.
fn no_ledger(topic: &str) -> String {
    format!("the ledger, topic {topic:?}, does not exist; {}", create_ledger(topic))
}

/// How to make one, with a partition for each lane of an outbox.
pub(super) fn create_ledger(topic: &str) -> String {
    format!(
        "create it with `kafka-topics.sh --create --topic {topic} --partitions {LANES_DEFAULT} --replication-factor 3`"
    )
}

#[async_trait]
impl Sink for KafkaTransactionsSink {
    fn system(&self) -> &'static str {
        "kafka"
    }

    fn limits(&self) -> SinkLimits {
        self.plain.limits()
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let _turn = self.turns.acquire().await.map_err(|error| self.unavailable(error))?;
        let by = Instant::now() + self.deadline();
        let mut lanes = BTreeMap::<u16, Vec<usize>>::new();
        for (place, way) in batch.ways().iter().enumerate() {
            lanes.entry(way.lane).or_default().push(place);
        }
        let published = lanes.iter().map(|(lane, places)| self.publish_lane(*lane, batch, places, by));
        let published = join_all(published).await;
        let mut verdicts = batch.silent();
        let (mut answered, mut away) = (false, None);
        for (places, published) in lanes.values().zip(published) {
            match published {
                Ok(judged) => {
                    for (place, verdict) in judged {
                        answered |= !matches!(verdict, Verdict::Unknown(_));
                        verdicts.judge(place, verdict);
                    }
                }
                Err(error) => {
                    let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                    for place in places {
                        verdicts.judge(*place, Verdict::Unknown(why.clone()));
                    }
                    away = Some(error);
                }
            }
        }
        match away {
            Some(error) if !answered => Err(error),
            _ => Ok(verdicts),
        }
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        self.plain.probe().await?;
        let ledger = &self.exactly_once.ledger;
        match self.plain.topic(&self.plain.producer().await?, ledger).await? {
            Topic::Missing => Err(self.unavailable(no_ledger(ledger))),
            Topic::There(_) | Topic::Hidden => {
                self.watcher.is_up();
                Ok(())
            }
        }
    }

    fn disconnected(&self) -> Option<String> {
        let why = self.watcher.down()?;
        Some(format!("no broker of Kafka at {} can be reached: {why}", self.shown))
    }

    async fn close(&self) {
        self.plain.close().await;
        let lanes: Vec<_> = self.lanes.lock().unwrap_or_else(PoisonError::into_inner).drain().collect();
        for (_, lane) in lanes {
            leave(&mut *lane.lock().await);
        }
    }
}

impl Drop for KafkaTransactionsSink {
    fn drop(&mut self) {
        for (_, lane) in self.lanes.get_mut().unwrap_or_else(PoisonError::into_inner).drain() {
            if let Ok(mut lane) = lane.try_lock() {
                leave(&mut lane);
            }
        }
    }
}
