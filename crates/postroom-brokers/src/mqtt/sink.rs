//! Publishing: each message has its own ack, whose reason says what became of it.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Batch, BoxError, FailureKind, MessageId, Sink, SinkLimits, Unavailable, Verdict, Verdicts, redact_url};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::connection::Connection;
use super::packet::Reason;
use super::{MqttOptions, Unheard, message};
use crate::OpenSinkError;
use crate::cloud_events::Events;
use crate::server_address::ServerAddress;
use crate::template::Template;

/// A batch is in memory twice while it is on its way.
const BATCH_BYTES_MAX: usize = 16 << 20;

/// Publishes to topics of one broker.
pub struct MqttSink {
    options: MqttOptions,
    address: ServerAddress,
    topic: Template,
    events: Option<Events>,
    /// The same for each connection: the broker ends the one before, and takes nothing more that was sent on it.
    client_id: String,
    turns: Semaphore,
    connection: Mutex<Option<Arc<Connection>>>,
    /// The connection, to be looked at without waiting for it.
    last: std::sync::Mutex<Option<Arc<Connection>>>,
}

impl MqttSink {
    /// Checks the options; connects with the first probe or batch.
    pub fn new(options: MqttOptions) -> Result<Self, OpenSinkError> {
        let (address, topic, events) = options.opened().map_err(|problem| OpenSinkError { kind: "mqtt", problem })?;
        let turns = Semaphore::new(options.batches_in_flight_max);
        let client_id = format!("{}-{}", options.client_id, MessageId::new().as_uuid().simple());
        let (connection, last) = (Mutex::default(), std::sync::Mutex::default());
        Ok(Self { options, address, topic, events, client_id, turns, connection, last })
    }

    fn unavailable(&self, error: impl Into<BoxError>) -> Unavailable {
        Unavailable::new(format!("MQTT at {}", redact_url(&self.options.url)), error)
    }

    fn deadline(&self) -> Duration {
        Duration::from_secs(self.options.publish_deadline_seconds)
    }

    async fn connected(&self) -> Result<Arc<Connection>, Unavailable> {
        let mut slot = self.connection.lock().await;
        if let Some(connection) = slot.as_ref().filter(|connection| connection.why_over().is_none()) {
            return Ok(connection.clone());
        }
        *slot = None;
        let opened = Connection::open(&self.address, &self.client_id).await;
        let connection = Arc::new(opened.map_err(|problem| self.unavailable(problem))?);
        if self.options.retain && !connection.connack.retain_available {
            return Err(self.unavailable("the broker keeps no retained messages: leave out retain"));
        }
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection.clone());
        *slot = Some(connection.clone());
        Ok(connection)
    }

    /// Ends a connection that did not answer in time: what is on it is sent by nobody later.
    async fn give_up(&self, connection: &Arc<Connection>, why: &str) {
        connection.kill(why);
        let mut slot = self.connection.lock().await;
        if slot.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection)) {
            *slot = None;
        }
    }

    /// What an ack means.
    fn judge(&self, topic: &str, reason: &Reason) -> Verdict {
        let failed =
            |kind, advice: &str| Verdict::failed(kind, format!("topic {topic:?}: the broker says: {reason}{advice}"));
        match reason.code {
            0x00 => Verdict::Stored,
            // Who subscribes later gets it.
            0x10 if self.options.retain => Verdict::Stored,
            0x10 if self.options.unheard == Unheard::Skip => Verdict::Skipped,
            0x10 => failed(
                FailureKind::Transient,
                "; nobody would ever get it. unheard = \"skip\" passes over such messages",
            ),
            0x87 => failed(FailureKind::Transient, "; let the user write to this topic"),
            0x90 | 0x99 | 0x95 => failed(FailureKind::Permanent, ""),
            0x97 => failed(FailureKind::Busy, ""),
            0x80 | 0x83 => failed(FailureKind::Transient, ""),
            _ => Verdict::Unknown(format!("topic {topic:?}: the broker says: {reason}")),
        }
    }
}

#[async_trait]
impl Sink for MqttSink {
    fn system(&self) -> &'static str {
        "mqtt"
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
        let connection = self.connected().await?;
        let by = Instant::now() + self.deadline();
        let mut verdicts = batch.silent();
        let packet_bytes_max = connection.connack.packet_bytes_max;
        let how = (self.options.retain, self.events.as_ref());
        let (mut acks, mut unsent) = (Vec::with_capacity(batch.messages().len()), 0);
        for (place, message) in batch.messages().iter().enumerate() {
            match message::publication(&self.topic, message, how, packet_bytes_max) {
                Ok(publication) => match timeout_at(by, connection.publish(&publication)).await {
                    Ok(Some(ack)) => acks.push((place, publication.topic, ack)),
                    Ok(None) | Err(_) => {
                        unsent = batch.messages().len() - place;
                        break;
                    }
                },
                Err(reason) => {
                    verdicts.judge(place, Verdict::failed(FailureKind::Permanent, reason));
                }
            }
        }
        let mut answered = batch.messages().len() - acks.len() - unsent;
        let mut late = None;
        for (place, topic, ack) in acks {
            match timeout_at(by, ack).await {
                Ok(Ok(reason)) => {
                    answered += 1;
                    verdicts.judge(place, self.judge(&topic, &reason));
                }
                Ok(Err(_)) | Err(_) => {
                    let silence = || format!("no ack within {} s", self.deadline().as_secs());
                    let why = late.get_or_insert_with(|| connection.why_over().unwrap_or_else(silence));
                    verdicts.judge(place, Verdict::Unknown(why.clone()));
                }
            }
        }
        let silence = (unsent > 0).then(|| format!("no ack within {} s", self.deadline().as_secs()));
        if let Some(why) = late.or_else(|| connection.why_over()).or(silence) {
            self.give_up(&connection, &why).await;
            if answered == 0 {
                return Err(self.unavailable(why));
            }
        }
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        self.connected().await.map(drop)
    }

    fn disconnected(&self) -> Option<String> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let why = last.as_ref()?.why_over()?;
        Some(format!("the connection to MQTT at {} has ended: {why}", redact_url(&self.options.url)))
    }

    async fn close(&self) {
        if let Some(connection) = self.connection.lock().await.take() {
            connection.leave();
        }
    }
}
