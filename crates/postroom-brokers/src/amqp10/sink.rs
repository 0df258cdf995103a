//! Publishing: each message has its own outcome.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Batch, BoxError, FailureKind, Sink, SinkLimits, Unavailable, Verdict, Verdicts, redact_url};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use super::Amqp10Options;
use super::connection::Connection;
use super::frame::Outcome;
use super::message::{self, Form};
use crate::OpenSinkError;
use crate::server_address::ServerAddress;

/// A batch is in memory twice while it is on its way.
const BATCH_BYTES_MAX: usize = 16 << 20;

/// A broker that is well gives credit with the link.
const READY_WITHIN: Duration = Duration::from_secs(5);

/// Of the standard, and of Azure Service Bus: waiting helps, and it is no message's fault.
const BUSY: [&str; 3] = ["amqp:resource-limit-exceeded", "com.microsoft:server-busy", "com.microsoft:timeout"];
/// This message will never be taken.
const PERMANENT: [&str; 5] = [
    "amqp:link:message-size-exceeded",
    "amqp:decode-error",
    "amqp:invalid-field",
    "com.microsoft:argument-error",
    "com.microsoft:argument-out-of-range",
];

/// Publishes to one node of one broker.
pub struct Amqp10Sink {
    options: Amqp10Options,
    server: ServerAddress,
    form: Form,
    turns: Semaphore,
    connection: Mutex<Option<Arc<Connection>>>,
    /// The connection, to be looked at without waiting for it.
    last: std::sync::Mutex<Option<Arc<Connection>>>,
}

impl Amqp10Sink {
    /// Checks the options; connects with the first probe or batch.
    pub fn new(options: Amqp10Options) -> Result<Self, OpenSinkError> {
        let (server, form) = options.opened().map_err(|problem| OpenSinkError { kind: "amqp10", problem })?;
        let turns = Semaphore::new(options.batches_in_flight_max);
        Ok(Self { options, server, form, turns, connection: Mutex::default(), last: Default::default() })
    }

    fn unavailable(&self, error: impl Into<BoxError>) -> Unavailable {
        let (address, url) = (&self.options.address, redact_url(&self.options.url));
        Unavailable::new(format!("{address:?} of AMQP 1.0 at {url}"), error)
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
        let opened = Connection::open(&self.server, self.form.node()).await;
        let connection = Arc::new(opened.map_err(|problem| self.unavailable(problem))?);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection.clone());
        *slot = Some(connection.clone());
        Ok(connection)
    }

    /// What an outcome means.
    fn judge(&self, to: Option<&str>, outcome: Outcome) -> Verdict {
        let node = to.unwrap_or(&self.options.address);
        match outcome {
            Outcome::Accepted => Verdict::Stored,
            Outcome::Rejected(Some(fault)) => {
                let kind = match fault.condition.as_str() {
                    condition if BUSY.contains(&condition) => FailureKind::Busy,
                    condition if PERMANENT.contains(&condition) => FailureKind::Permanent,
                    _ => FailureKind::Transient,
                };
                Verdict::failed(kind, format!("{node}: rejected: {fault}"))
            }
            // RabbitMQ 4.0 says no more of a queue that is full.
            Outcome::Rejected(None) => Verdict::failed(FailureKind::Busy, format!("{node}: rejected without a reason")),
            Outcome::Released => Verdict::failed(
                FailureKind::Transient,
                format!("{node}: released: no queue takes it; make the queue, or bind one for its routing key"),
            ),
            Outcome::Modified { undeliverable } => {
                let more = if undeliverable { ", and is not to be sent there again" } else { "" };
                Verdict::failed(FailureKind::Transient, format!("{node}: modified: it was not delivered{more}"))
            }
            Outcome::None => Verdict::Unknown(format!("{node}: settled without an outcome")),
        }
    }
}

#[async_trait]
impl Sink for Amqp10Sink {
    fn system(&self) -> &'static str {
        "amqp10"
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
        let messages = batch.messages();
        let mut verdicts = batch.silent();
        let (mut pending, mut unsent) = (Vec::with_capacity(messages.len()), 0);
        for (place, message) in messages.iter().enumerate() {
            let (sections, to) = match message::sections(&self.form, message) {
                Ok(sections) => sections,
                Err(reason) => {
                    verdicts.judge(place, Verdict::failed(FailureKind::Permanent, reason));
                    continue;
                }
            };
            if let Some(most) = connection.message_bytes_max.filter(|most| sections.len() as u64 > *most) {
                let reason = format!(
                    "with its headers it has {} bytes, and {} takes messages of {most} (max-message-size)",
                    sections.len(),
                    to.as_deref().unwrap_or(&self.options.address)
                );
                verdicts.judge(place, Verdict::failed(FailureKind::Permanent, reason));
                continue;
            }
            match timeout_at(by, connection.publish(&sections)).await {
                Ok(Some(outcome)) => pending.push((place, to, outcome)),
                Ok(None) | Err(_) => {
                    unsent = messages.len() - place;
                    break;
                }
            }
        }
        let mut answered = messages.len() - pending.len() - unsent;
        // A part of the first may have reached the broker. Then the connection has ended, and the part with it.
        (messages.len() - unsent..messages.len()).for_each(|place| {
            verdicts.judge(place, Verdict::NotSent);
        });
        let silence = || format!("no outcome within {} s", self.deadline().as_secs());
        let mut late = None;
        for (place, to, outcome) in pending {
            match timeout_at(by, outcome).await {
                Ok(Ok(outcome)) => {
                    answered += 1;
                    verdicts.judge(place, self.judge(to.as_deref(), outcome));
                }
                Ok(Err(_)) | Err(_) => {
                    let why = late.get_or_insert_with(|| connection.why_over().unwrap_or_else(silence));
                    verdicts.judge(place, Verdict::Unknown(why.clone()));
                }
            }
        }
        let full = || {
            format!("the broker has taken no more messages for {} s (it gives no credit)", self.deadline().as_secs())
        };
        if let Some(why) = &late {
            // What is on it is sent by nobody later.
            connection.kill(why);
        }
        match late.or_else(|| connection.why_over()).or_else(|| (unsent > 0).then(full)) {
            Some(why) if answered == 0 => Err(self.unavailable(why)),
            _ => Ok(verdicts),
        }
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        let connection = self.connected().await?;
        match timeout(self.deadline().min(READY_WITHIN), connection.ready()).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.unavailable(connection.why_over().unwrap_or_default())),
            Err(_) => Err(self.unavailable("the broker takes no messages (it gives no credit)")),
        }
    }

    fn disconnected(&self) -> Option<String> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let why = last.as_ref()?.why_over()?;
        Some(format!("the connection to AMQP 1.0 at {} has ended: {why}", redact_url(&self.options.url)))
    }

    async fn close(&self) {
        if let Some(connection) = self.connection.lock().await.take() {
            connection.leave();
        }
    }
}
