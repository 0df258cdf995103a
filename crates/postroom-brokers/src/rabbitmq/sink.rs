//! Publishing: a few channels take turns, each with a barrier of confirms a batch.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions};
use lapin::protocol::{AMQPErrorKind, AMQPSoftError};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Confirmation, Connection, ConnectionStatus, ErrorKind, ExchangeKind, PublisherConfirm};
use postroom::{Batch, FailureKind, Sink, SinkLimits, Unavailable, Verdict, Verdicts, redact_url};
use tokio::sync::{Mutex, Semaphore};

use super::{RabbitmqOptions, connect, properties};
use crate::OpenSinkError;

/// How often within its deadline a publish looks whether the broker has blocked the connection.
const DEADLINE_PARTS: u32 = 8;

/// A batch is in memory twice while it is on its way.
const BATCH_BYTES_MAX: usize = 16 << 20;

/// Publishes to one topic exchange.
pub struct RabbitmqSink {
    options: RabbitmqOptions,
    exchange: ShortString,
    turns: Semaphore,
    pool: Mutex<Pool>,
    /// Of the connection in the pool, to be looked at without waiting for it.
    status: std::sync::Mutex<Option<ConnectionStatus>>,
}

/// The connection and its idle channels. A channel is taken out while a batch is on it: one that a cancelled or failed
/// batch leaves behind is never used again.
#[derive(Default)]
struct Pool {
    connection: Option<Connection>,
    idle: Vec<Channel>,
}

/// What the broker said of one message on its own.
enum Answer {
    Acked,
    Nacked,
    /// The broker closed the channel over something in the batch.
    Refused(String),
    Nothing(String),
}

/// Channel exceptions that the broker raises over a message: its routing key may not be written to (403 with topic
/// permissions), a property or its size is not accepted (406, 311). A missing exchange (404), or one that nothing may be
/// written to (403 without a topic), is nobody's fault but the topology's.
fn answer_of(error: &lapin::Error) -> Answer {
    if let ErrorKind::ProtocolError(protocol) = error.kind()
        && let AMQPErrorKind::Soft(soft) = protocol.kind()
    {
        let text = error.to_string();
        let over_the_message = match soft {
            AMQPSoftError::ACCESSREFUSED => text.contains("access to topic '"),
            AMQPSoftError::PRECONDITIONFAILED | AMQPSoftError::CONTENTTOOLARGE => true,
            _ => false,
        };
        if over_the_message {
            return Answer::Refused(text);
        }
    }
    Answer::Nothing(error.to_string())
}

impl RabbitmqSink {
    /// Checks the options; connects with the first probe or batch.
    pub fn new(options: RabbitmqOptions) -> Result<Self, OpenSinkError> {
        options.check()?;
        let exchange = ShortString::try_new(options.exchange.as_str())
            .map_err(|error| OpenSinkError { kind: "rabbitmq", problem: error.to_string() })?;
        Ok(Self {
            turns: Semaphore::new(options.channels),
            exchange,
            options,
            pool: Mutex::default(),
            status: Default::default(),
        })
    }

    fn unavailable(&self, error: impl Into<postroom::BoxError>) -> Unavailable {
        Unavailable::new(format!("RabbitMQ at {}", redact_url(&self.options.url)), error)
    }

    fn deadline(&self) -> Duration {
        Duration::from_secs(self.options.publish_deadline_seconds)
    }

    fn no_answer(&self) -> String {
        format!("no answer within {} s", self.deadline().as_secs())
    }

    async fn channel(&self) -> Result<(Channel, ConnectionStatus), Unavailable> {
        let mut pool = self.pool.lock().await;
        if pool.connection.as_ref().is_none_or(|connection| !connection.status().connected()) {
            pool.idle.clear();
            let connection = connect(&self.options.url, "postroom relay", None).await?;
            *self.status.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection.status().clone());
            pool.connection = Some(connection);
        }
        let Pool { connection: Some(connection), idle } = &mut *pool else {
            return Err(self.unavailable("no connection"));
        };
        let status = connection.status().clone();
        while let Some(channel) = idle.pop() {
            if channel.status().connected() {
                return Ok((channel, status));
            }
        }
        let opened = self.in_time(&status, self.open_channel(connection)).await;
        let opened = opened.ok_or_else(|| self.unavailable(self.no_answer()))?;
        Ok((opened.map_err(|error| self.unavailable(error))?, status))
    }

    /// What publishing, or opening a channel for it, brings within the deadline. The deadline counts from when an alarm of the
    /// broker (memory, disk) last kept the connection blocked: nothing is sent meanwhile and nothing is lost by waiting, whereas a
    /// new connection would be blocked too, and what this one had sent before would be stored twice.
    async fn in_time<T>(&self, connection: &ConnectionStatus, publishing: impl Future<Output = T>) -> Option<T> {
        let mut publishing = std::pin::pin!(publishing);
        let mut free = 0;
        loop {
            match tokio::time::timeout(self.deadline() / DEADLINE_PARTS, &mut publishing).await {
                Ok(outcome) => return Some(outcome),
                Err(_) if connection.connected() && connection.blocked() => free = 0,
                Err(_) => free += 1,
            }
            if free >= DEADLINE_PARTS {
                return None;
            }
        }
    }

    async fn open_channel(&self, connection: &Connection) -> Result<Channel, lapin::Error> {
        let channel = connection.create_channel().await?;
        if !self.options.exchange.is_empty() {
            let options =
                ExchangeDeclareOptions { durable: true, passive: !self.options.declare, ..Default::default() };
            channel
                .exchange_declare(self.exchange.clone(), ExchangeKind::Topic, options, FieldTable::default())
                .await?;
        }
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(channel)
    }

    /// Publishes everything, then waits for every confirm: the barrier. Returns what the broker said of each place in the batch, and
    /// the ids of messages that it returned, with its reason. The channel is fit for another batch only if every answer came.
    async fn publish_on(
        &self,
        channel: &Channel,
        batch: &Batch,
        verdicts: &mut Verdicts,
    ) -> (Vec<(usize, Answer)>, HashMap<String, String>, bool) {
        let mut pending: Vec<(usize, PublisherConfirm)> = Vec::with_capacity(batch.messages().len());
        let mut answers = Vec::with_capacity(batch.messages().len());
        let options = BasicPublishOptions { mandatory: true, ..Default::default() };
        let mut broken = false;
        for (place, message) in batch.messages().iter().enumerate() {
            let prepared = properties::to_properties(message).and_then(|properties| {
                let address = ShortString::try_new(message.address()).map_err(|error| error.to_string())?;
                Ok((properties, address))
            });
            let (properties, address) = match prepared {
                Ok(prepared) => prepared,
                Err(reason) => {
                    verdicts.judge(place, Verdict::failed(FailureKind::Permanent, reason));
                    continue;
                }
            };
            let sent =
                channel.basic_publish(self.exchange.clone(), address, options, &message.payload, properties).await;
            match sent {
                Ok(confirm) => pending.push((place, confirm)),
                Err(error) => {
                    // The rest of the batch was not sent; it stays unknown like everything that is open.
                    answers.push((place, answer_of(&error)));
                    broken = true;
                    break;
                }
            }
        }
        let mut returned = HashMap::new();
        let confirms =
            join_all(pending.into_iter().map(|(place, confirm)| async move { (place, confirm.await) })).await;
        for (place, confirm) in confirms {
            let (answer, message) = match confirm {
                Ok(Confirmation::Ack(message)) => (Answer::Acked, message),
                Ok(Confirmation::Nack(message)) => (Answer::Nacked, message),
                Ok(Confirmation::NotRequested) => (Answer::Nothing("confirms are off".to_owned()), None),
                Err(error) => (answer_of(&error), None),
            };
            broken |= matches!(answer, Answer::Nothing(_) | Answer::Refused(_));
            // The return in this confirm may belong to any message of the batch.
            if let Some(message) = message {
                let reason = format!("{} {}", message.reply_code, message.reply_text);
                match message.delivery.properties.message_id() {
                    Some(id) => {
                        returned.insert(id.as_str().to_owned(), reason);
                    }
                    // Not attributable: nothing on this channel can be trusted.
                    None => broken = true,
                }
            }
            answers.push((place, answer));
        }
        (answers, returned, !broken)
    }
}

#[async_trait]
impl Sink for RabbitmqSink {
    fn system(&self) -> &'static str {
        "rabbitmq"
    }

    fn limits(&self) -> SinkLimits {
        SinkLimits {
            batch_messages_max: self.options.batch_messages_max,
            batch_bytes_max: BATCH_BYTES_MAX,
            batches_in_flight_max: self.options.channels,
        }
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let _turn = self.turns.acquire().await.map_err(|error| self.unavailable(error))?;
        let (channel, connection) = self.channel().await?;
        let mut verdicts = batch.silent();
        let outcome = self.in_time(&connection, self.publish_on(&channel, batch, &mut verdicts)).await;
        let Some((answers, returned, complete)) = outcome else {
            // Whatever was confirmed in time is unknown too: a return may still have been on its way. Nobody may use the
            // connection any more; a broker that does not answer for so long is as good as gone.
            self.pool.lock().await.connection = None;
            return Err(self.unavailable(self.no_answer()));
        };
        let mut answered = false;
        let mut last_error = None;
        for (place, answer) in answers {
            // Where several have one id, all of them count as returned.
            let returned = batch.messages().get(place).and_then(|message| returned.get(&message.id.to_string()));
            let verdict = match (answer, returned) {
                // A return counts even when the barrier is incomplete: it can only make a verdict more careful.
                (Answer::Acked | Answer::Nacked, Some(reason)) => {
                    let reason = format!(
                        "returned as unroutable ({reason}): no queue is bound to exchange {:?} for this routing key",
                        self.options.exchange
                    );
                    Verdict::failed(FailureKind::Transient, reason)
                }
                // Without the barrier a return may be attached to a confirm that never came.
                (Answer::Acked, None) if !complete => {
                    Verdict::Unknown("the batch's confirms are incomplete".to_owned())
                }
                (Answer::Acked, None) => Verdict::Stored,
                (Answer::Nacked, None) => Verdict::failed(
                    FailureKind::Busy,
                    "the broker did not accept it (nack): a queue is full or has a problem",
                ),
                // Alone in its batch, it is the message's own fault; in company nobody knows whose, and the relay publishes
                // them again one by one.
                (Answer::Refused(error), _) if batch.messages().len() == 1 => Verdict::failed(
                    FailureKind::Transient,
                    format!("the broker closed the channel because of it: {error}"),
                ),
                (Answer::Refused(error), _) => Verdict::Unknown(error),
                (Answer::Nothing(error), _) => {
                    last_error = Some(error.clone());
                    verdicts.judge(place, Verdict::Unknown(error));
                    continue;
                }
            };
            answered = true;
            verdicts.judge(place, verdict);
        }
        if complete {
            self.pool.lock().await.idle.push(channel);
        } else if let Some(error) = last_error.filter(|_| !answered) {
            return Err(self.unavailable(error));
        }
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        let (channel, _) = self.channel().await?;
        self.pool.lock().await.idle.push(channel);
        Ok(())
    }

    fn blocked(&self) -> Option<String> {
        let status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        let blocked = status.as_ref().is_some_and(|status| status.connected() && status.blocked());
        blocked.then(|| {
            let url = redact_url(&self.options.url);
            format!("RabbitMQ at {url} has blocked this connection (a memory or disk alarm)")
        })
    }

    fn disconnected(&self) -> Option<String> {
        let status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = status.as_ref().is_some_and(|status| !status.connected());
        gone.then(|| format!("the connection to RabbitMQ at {} has ended", redact_url(&self.options.url)))
    }

    async fn close(&self) {
        let mut pool = self.pool.lock().await;
        if let Some(connection) = pool.connection.take() {
            // The peer may be gone; a close that is not answered is not waited for.
            let _ = tokio::time::timeout(Duration::from_secs(2), connection.close(200, "bye".into())).await;
        }
        pool.idle.clear();
    }
}
