//! Publishing: each message has its own delivery report.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use postroom::{Batch, BoxError, FailureKind, Message, Sink, SinkLimits, Unavailable, Verdict, Verdicts};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::future_producer::DeliveryFuture;
use rdkafka::producer::{FutureRecord, Producer as _};
use tokio::sync::{Mutex, RwLock, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::client::{self, Producer, Watcher};
use super::topics::{self, Topic, Topics};
use super::{KafkaOptions, Opened, address, record};
use crate::OpenSinkError;
use crate::cloud_events::Events;

/// A batch is in memory twice while it is on its way.
const BATCH_BYTES_MAX: usize = 16 << 20;
const ENDS_EVERY: Duration = Duration::from_millis(20);
/// The client reports a message that ran out of time a little later.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// Publishes to topics of one cluster.
pub struct KafkaSink {
    options: KafkaOptions,
    opened: Opened,
    shown: String,
    turns: Semaphore,
    /// Read-locked by calls that publish at the same time, write-locked while a message must be sent alone.
    company: RwLock<()>,
    producer: Mutex<Option<Arc<Producer>>>,
    watcher: Watcher,
    topics: Topics,
}

impl KafkaSink {
    /// Checks the options; connects with the first probe or batch.
    pub fn new(options: KafkaOptions) -> Result<Self, OpenSinkError> {
        let opened = options.opened().map_err(|problem| OpenSinkError { kind: "kafka", problem })?;
        let turns = Semaphore::new(options.batches_in_flight_max);
        let shown = address::shown(&options.url);
        let (producer, watcher, topics) = (Mutex::default(), Watcher::default(), Topics::default());
        let company = RwLock::default();
        Ok(Self { options, opened, shown, turns, company, producer, watcher, topics })
    }

    fn unavailable(&self, error: impl Into<BoxError>) -> Unavailable {
        Unavailable::new(format!("Kafka at {}", self.shown), error)
    }

    fn deadline(&self) -> Duration {
        Duration::from_secs(self.options.publish_deadline_seconds)
    }

    /// A producer; a new one where there is none. It connects by itself.
    pub(super) async fn producer(&self) -> Result<Arc<Producer>, Unavailable> {
        let mut slot = self.producer.lock().await;
        if let Some(producer) = slot.as_ref() {
            return Ok(producer.clone());
        }
        let made = client::producer(&self.opened.address, &self.options, self.watcher.clone());
        let producer = Arc::new(made.map_err(|error| self.unavailable(error))?);
        *slot = Some(producer.clone());
        Ok(producer)
    }

    /// Ends a producer: nothing that it still has is sent.
    async fn leave(&self, producer: &Arc<Producer>) {
        let mut slot = self.producer.lock().await;
        if slot.as_ref().is_some_and(|current| Arc::ptr_eq(current, producer)) {
            *slot = None;
        }
        end(producer.clone());
    }

    /// Whether a topic is there.
    pub(super) async fn topic(&self, producer: &Arc<Producer>, name: &str) -> Result<Topic, Unavailable> {
        let found = self.topics.find(producer, name, self.deadline()).await;
        let found = found.map_err(|problem| self.unavailable(self.watcher.down().unwrap_or(problem)))?;
        self.watcher.is_up();
        Ok(found)
    }

    /// Hands over all messages that can be sent. Returns what will be reported, by the place in the batch.
    async fn hand_over(
        &self,
        producer: &Arc<Producer>,
        batch: &Batch,
        verdicts: &mut Verdicts,
    ) -> Result<Vec<(usize, String, DeliveryFuture)>, Unavailable> {
        let by = Instant::now() + self.deadline();
        let mut topics = HashMap::<String, Topic>::new();
        let mut chosen = Vec::with_capacity(batch.messages().len());
        for (place, message) in batch.messages().iter().enumerate() {
            let topic = match record::topic(&self.opened.topic, message) {
                Ok(topic) => topic,
                Err(reason) => {
                    verdicts.judge(place, Verdict::failed(FailureKind::Permanent, reason));
                    continue;
                }
            };
            let found = match topics.get(&topic) {
                Some(found) => *found,
                // Many topics, and a slow broker: the rest has no verdict.
                None if Instant::now() >= by => break,
                None => self.topic(producer, &topic).await?,
            };
            topics.insert(topic.clone(), found);
            if found == Topic::Missing {
                verdicts.judge(place, Verdict::failed(FailureKind::Transient, record::no_such_topic(&topic)));
            } else {
                chosen.push((place, topic, message));
            }
        }
        // No await in between: a call that is dropped has handed over all of its messages or none.
        let mut pending = Vec::with_capacity(chosen.len());
        for (place, topic, message) in chosen {
            match send(producer, &topic, message, self.opened.events.as_ref()) {
                Ok(report) => pending.push((place, topic, report)),
                Err(error) => {
                    // Of the client itself, about this message.
                    verdicts.judge(place, verdict(&error, &topic, true));
                }
            }
        }
        Ok(pending)
    }
}

impl KafkaSink {
    /// Sends messages whose request was refused one after the other, while nothing else is on its way, so that what the broker says is about
    /// this one. The broker has stored none of them. A message stays unknown if a later one of its key was stored, or if the time is up.
    async fn send_alone(
        &self,
        producer: &Producer,
        batch: &Batch,
        refused: Vec<(usize, &str)>,
        by: Instant,
        verdicts: &mut Verdicts,
    ) {
        if refused.is_empty() {
            return;
        }
        let Ok(_alone) = timeout_at(by, self.company.write()).await else { return };
        let mut left_behind = HashSet::new();
        for (place, topic) in refused {
            let Some(message) = batch.messages().get(place) else { continue };
            let key = message.ordering_key();
            let of_key = |other: &Message| key.is_some() && other.ordering_key() == key;
            let is_overtaken = batch
                .messages()
                .iter()
                .enumerate()
                .skip(place + 1)
                .any(|(later, other)| of_key(other) && verdicts.of(later) == Some(&Verdict::Stored));
            let is_alone = nothing_in_flight(producer, by).await;
            if is_overtaken || !is_alone || key.is_some_and(|key| left_behind.contains(key)) || Instant::now() >= by {
                left_behind.extend(key);
                continue;
            }
            let verdict = match send(producer, topic, message, self.opened.events.as_ref()) {
                Ok(report) => match timeout_at(by + GRACE, report).await {
                    Ok(Ok(Ok(_))) => Verdict::Stored,
                    Ok(Ok(Err((error, _)))) => verdict(&error, topic, true),
                    Ok(Err(_)) | Err(_) => Verdict::Unknown("no confirmation of it alone".to_owned()),
                },
                Err(error) => verdict(&error, topic, true),
            };
            if verdict != Verdict::Stored {
                left_behind.extend(key);
            }
            verdicts.judge(place, verdict);
        }
    }
}

/// Waits until the client has nothing left of calls that were dropped, and has delivered all reports, which it counts too.
async fn nothing_in_flight(producer: &Producer, by: Instant) -> bool {
    while producer.in_flight_count() > 0 {
        if Instant::now() >= by {
            return false;
        }
        sleep(Duration::from_millis(1)).await;
    }
    true
}

/// Hands it to the client, which reports what became of it.
pub(super) fn send(
    producer: &Producer,
    topic: &str,
    message: &Message,
    events: Option<&Events>,
) -> Result<DeliveryFuture, KafkaError> {
    let (headers, value) = record::of(message, events);
    let mut written = OwnedHeaders::new_with_capacity(headers.len());
    for (name, value) in &headers {
        written = written.insert(Header { key: name, value: Some(value.as_ref()) });
    }
    let record = FutureRecord::<str, [u8]>::to(topic).payload(value.as_ref()).headers(written);
    let record = match message.ordering_key() {
        Some(key) => record.key(key),
        None => record,
    };
    producer.send_result(record).map_err(|(error, _)| error)
}

/// Ends a producer without waiting for its threads: nothing that it still has is sent.
pub(super) fn end(producer: Arc<Producer>) {
    let end = move || {
        client::purge(&producer);
        // Whoever drops the last one waits for its threads.
        while Arc::strong_count(&producer) > 1 {
            std::thread::park_timeout(ENDS_EVERY);
        }
        drop(producer);
    };
    if let Err(error) = std::thread::Builder::new().name("kafka-end".to_owned()).spawn(end) {
        tracing::warn!("end a Kafka producer: {error}");
    }
}

/// A broker refuses a whole batch because of one message in it, or because of its size, and does not say which.
pub(super) fn is_about_a_batch(code: Code) -> bool {
    matches!(
        code,
        Code::MessageSizeTooLarge
            | Code::MessageBatchTooLarge
            | Code::InvalidRecord
            | Code::InvalidMessage
            | Code::InvalidTimestamp
    )
}

/// What a report means. `alone`: no other message can have been in the same request.
pub(super) fn verdict(error: &KafkaError, topic: &str, alone: bool) -> Verdict {
    let unknown = || Verdict::Unknown(error.to_string());
    let KafkaError::MessageProduction(code) = error else { return unknown() };
    let about = |kind, reason: String| Verdict::failed(kind, reason);
    match code {
        _ if !alone && is_about_a_batch(*code) => {
            Verdict::Unknown(format!("the broker refused several messages for topic {topic:?} because of one of them: {code}"))
        }
        Code::MessageSizeTooLarge | Code::MessageBatchTooLarge | Code::InvalidMessageSize => about(
            FailureKind::Permanent,
            format!("topic {topic:?} takes no message as large as this (max.message.bytes of the topic, message.max.bytes of the broker): {code}"),
        ),
        Code::InvalidRecord | Code::InvalidMessage | Code::InvalidTimestamp => about(
            FailureKind::Permanent,
            format!("topic {topic:?} takes no message like this; a compacted topic takes none without a key: {code}"),
        ),
        Code::InvalidTopic | Code::PolicyViolation | Code::UnsupportedForMessageFormat => {
            about(FailureKind::Permanent, format!("topic {topic:?} refused it: {code}"))
        }
        Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition => {
            about(FailureKind::Transient, record::no_such_topic(topic))
        }
        Code::TopicAuthorizationFailed => about(
            FailureKind::Transient,
            format!("the user may not write to topic {topic:?}; give it WRITE and DESCRIBE there"),
        ),
        Code::ClusterAuthorizationFailed => about(
            FailureKind::Transient,
            "the user may not be an idempotent producer; give it WRITE on the topic (Kafka 2.8 and newer) or IDEMPOTENT_WRITE on the cluster".to_owned(),
        ),
        // Not because of the message.
        Code::NotEnoughReplicas => about(
            FailureKind::Busy,
            format!("topic {topic:?} has fewer replicas in sync than its min.insync.replicas"),
        ),
        Code::QueueFull => about(FailureKind::Busy, format!("the client has no room for it: {code}")),
        // Timed out, cut off, purged, stored by too few replicas: it may be there.
        _ => unknown(),
    }
}

#[async_trait]
impl Sink for KafkaSink {
    fn system(&self) -> &'static str {
        "kafka"
    }

    fn limits(&self) -> SinkLimits {
        SinkLimits {
            batch_messages_max: self.options.batch_messages_max,
            batch_bytes_max: BATCH_BYTES_MAX,
            batches_in_flight_max: self.options.batches_in_flight_max,
        }
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let _turn = self.turns.acquire().await.map_err(|error| self.unavailable(error))?;
        let producer = self.producer().await?;
        let mut verdicts = batch.silent();
        let company = self.company.read().await;
        let pending = self.hand_over(&producer, batch, &mut verdicts).await?;
        let (mut places, mut reports) = (Vec::with_capacity(pending.len()), Vec::with_capacity(pending.len()));
        for (place, topic, report) in pending {
            places.push((place, topic));
            reports.push(report);
        }
        if reports.is_empty() {
            return Ok(verdicts);
        }
        let by = Instant::now() + self.deadline();
        let Ok(reported) = timeout_at(by + GRACE, join_all(reports)).await else {
            self.leave(&producer).await;
            return Err(self.unavailable("its client reported nothing within the deadline"));
        };
        let (mut answered, mut last, mut refused) = (false, None, Vec::new());
        for ((place, topic), report) in places.iter().zip(reported) {
            let verdict = match report {
                Ok(Ok(_)) => Verdict::Stored,
                Ok(Err((error, _))) => {
                    if error.rdkafka_error_code().is_some_and(is_about_a_batch) {
                        refused.push((*place, topic.as_str()));
                    }
                    let verdict = verdict(&error, topic, false);
                    last = Some(error);
                    verdict
                }
                Err(_) => Verdict::Unknown("the producer was ended before it was reported".to_owned()),
            };
            answered |= !matches!(verdict, Verdict::Unknown(_));
            verdicts.judge(*place, verdict);
        }
        answered |= !refused.is_empty();
        drop(company);
        self.send_alone(&producer, batch, refused, by, &mut verdicts).await;
        if answered {
            self.watcher.is_up();
        } else {
            // What was known of topics may not be so any more.
            self.topics.ask_again();
        }
        if let Some((code, reason)) = producer.client().fatal_error() {
            tracing::warn!(%code, reason, "the Kafka producer is ended and made anew");
            self.leave(&producer).await;
        }
        match last {
            Some(KafkaError::MessageProduction(Code::MessageTimedOut | Code::BrokerTransportFailure)) if !answered => {
                let why = self
                    .watcher
                    .down()
                    .unwrap_or_else(|| format!("no confirmation within {} s", self.deadline().as_secs()));
                Err(self.unavailable(why))
            }
            _ => Ok(verdicts),
        }
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        let producer = self.producer().await?;
        let Some(topic) = self.opened.topic.fixed() else {
            let within = topics::WITHIN.min(self.deadline());
            let asked = producer.clone();
            let asking = spawn_blocking(move || asked.client().fetch_metadata(None, within).map(drop));
            let answered = timeout(within + GRACE, asking).await;
            return match answered {
                Ok(Ok(Ok(()))) => {
                    self.watcher.is_up();
                    Ok(())
                }
                Ok(Ok(Err(error))) => Err(self.unavailable(self.watcher.down().unwrap_or_else(|| error.to_string()))),
                Ok(Err(error)) => Err(self.unavailable(error)),
                Err(_) => Err(self.unavailable("its client does not answer")),
            };
        };
        // Asked anew, and compared with what it was.
        self.topics.ask_again();
        match self.topic(&producer, topic).await? {
            Topic::Missing => Err(self.unavailable(record::no_such_topic(topic))),
            Topic::There(_) | Topic::Hidden => Ok(()),
        }
    }

    fn disconnected(&self) -> Option<String> {
        let why = self.watcher.down()?;
        Some(format!("no broker of Kafka at {} can be reached: {why}", self.shown))
    }

    async fn close(&self) {
        if let Some(producer) = self.producer.lock().await.take() {
            end(producer);
        }
    }
}

impl Drop for KafkaSink {
    fn drop(&mut self) {
        if let Some(producer) = self.producer.get_mut().take() {
            end(producer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_broker_says_of_a_batch_kills_no_message_in_it() {
        let of = |code, alone| verdict(&KafkaError::MessageProduction(code), "orders", alone);
        for code in [Code::MessageSizeTooLarge, Code::MessageBatchTooLarge, Code::InvalidRecord] {
            assert!(matches!(of(code, false), Verdict::Unknown(_)), "{code}");
            assert!(
                matches!(of(code, true), Verdict::Failed(failure) if failure.kind == FailureKind::Permanent),
                "{code}"
            );
        }
    }

    #[test]
    fn what_may_have_been_stored_is_unknown() {
        let of = |code| verdict(&KafkaError::MessageProduction(code), "orders", true);
        let codes = [
            Code::MessageTimedOut,
            Code::NotEnoughReplicasAfterAppend,
            Code::KafkaStorageError,
            Code::PurgeInflight,
            Code::BrokerTransportFailure,
            Code::OutOfOrderSequenceNumber,
            Code::RequestTimedOut,
            Code::Fatal,
        ];
        for code in codes {
            assert!(matches!(of(code), Verdict::Unknown(_)), "{code}");
        }
        assert!(matches!(of(Code::NotEnoughReplicas), Verdict::Failed(failure) if failure.kind == FailureKind::Busy));
    }
}
