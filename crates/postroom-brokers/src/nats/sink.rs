//! Publishing: a batch is one write, and each message has its own answer.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use futures_util::future::join_all;
use postroom::{Batch, FailureKind, Message, Sink, SinkLimits, Unavailable, Verdict, Verdicts};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::connection::{Answer, Connection, Pending};
use super::jetstream::{ApiError, JetStream, PubAck, StreamInfo, Unanswered, read};
use super::{NatsOptions, Opened, headers, subject};
use crate::OpenSinkError;

/// A batch is in memory twice while it is on its way.
const BATCH_BYTES_MAX: usize = 16 << 20;
/// Duplicates of one batch whose originals are looked up at a time.
const LOOKED_UP_AT_ONCE: usize = 50;

/// Publishes to one stream of JetStream.
pub struct NatsSink {
    options: NatsOptions,
    opened: Opened,
    turns: Semaphore,
    connection: Mutex<Option<Arc<Connection>>>,
    /// The connection, to be looked at without waiting for it.
    last: std::sync::Mutex<Option<Arc<Connection>>>,
}

impl NatsSink {
    /// Checks the options; connects with the first probe or batch.
    pub fn new(options: NatsOptions) -> Result<Self, OpenSinkError> {
        let opened = options.opened().map_err(|problem| OpenSinkError { kind: "nats", problem })?;
        let turns = Semaphore::new(options.batches_in_flight_max);
        Ok(Self { options, opened, turns, connection: Mutex::default(), last: Default::default() })
    }

    fn unavailable(&self, error: impl Into<postroom::BoxError>) -> Unavailable {
        Unavailable::new(format!("stream {:?} of NATS at {}", self.options.stream, self.opened.shown), error)
    }

    fn deadline(&self) -> Duration {
        Duration::from_secs(self.options.publish_deadline_seconds)
    }

    fn jetstream<'c>(&'c self, connection: &'c Connection, by: Instant) -> JetStream<'c> {
        JetStream { connection, api: &self.opened.api, by }
    }

    /// A connection over which the stream was found.
    async fn connected(&self) -> Result<Arc<Connection>, Unavailable> {
        let mut slot = self.connection.lock().await;
        if let Some(connection) = slot.as_ref().filter(|connection| connection.over().is_none()) {
            return Ok(connection.clone());
        }
        *slot = None;
        let connection = self.opened.connect("postroom relay").await.map_err(|problem| self.unavailable(problem))?;
        let connection = Arc::new(connection);
        let stream = self.stream(&connection).await.map_err(|problem| self.unavailable(problem))?;
        if stream.config.no_ack {
            return Err(self.unavailable(super::check::NO_ACK));
        }
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection.clone());
        *slot = Some(connection.clone());
        Ok(connection)
    }

    /// The stream; it is made where it is missing and the options have its subjects.
    async fn stream(&self, connection: &Connection) -> Result<StreamInfo, String> {
        let jetstream = self.jetstream(connection, Instant::now() + self.deadline());
        let NatsOptions { stream, subjects, replicas, .. } = &self.options;
        match jetstream.stream(stream).await {
            Err(Unanswered::Refused(error)) if error.err_code == ApiError::STREAM_NOT_FOUND && !subjects.is_empty() => {
                jetstream
                    .create_stream(stream, subjects, *replicas)
                    .await
                    .map_err(|error| format!("create it: {error}"))
            }
            Err(Unanswered::Refused(error)) if error.err_code == ApiError::STREAM_NOT_FOUND => {
                Err(format!("it does not exist; {}", super::check::advice_to_create(stream)))
            }
            other => other.map_err(|error| error.to_string()),
        }
    }

    /// Ends a connection that did not answer in time: what is on it is sent by nobody later.
    async fn leave(&self, connection: &Arc<Connection>, why: &str) {
        connection.kill(why);
        let mut slot = self.connection.lock().await;
        if slot.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection)) {
            *slot = None;
        }
    }

    /// Writes all messages that can be written. Returns what will be answered, by the place in the batch.
    fn write(
        &self,
        connection: &Connection,
        batch: &Batch,
        bytes: &mut BytesMut,
        verdicts: &mut Verdicts,
    ) -> Vec<(usize, String, Pending)> {
        let mut pending = Vec::with_capacity(batch.messages().len());
        let largest = connection.info.max_payload;
        for (place, message) in batch.messages().iter().enumerate() {
            let mut refuse = |reason| {
                verdicts.judge(place, Verdict::failed(FailureKind::Permanent, reason));
            };
            let subject = match subject::of(&self.opened.subject, message) {
                Ok(subject) => subject,
                Err(reason) => {
                    refuse(reason);
                    continue;
                }
            };
            let headers = headers::of(message, &self.options.stream);
            // As the server counts it: `NATS/1.0`, and a line for each.
            let lines: usize = headers.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
            let size = message.payload.len() + lines + "NATS/1.0\r\n\r\n".len();
            if size > largest {
                // The server would end the connection over it.
                refuse(format!(
                    "it has {size} bytes with its headers, and the server takes {largest} (max_payload); send less, or raise that limit"
                ));
                continue;
            }
            let lines = headers.iter().map(|(name, value)| (name.as_ref(), value.as_ref()));
            pending.push((place, subject.clone(), connection.request(bytes, &subject, lines, &message.payload)));
        }
        pending
    }

    /// What the server's answer means. None: it says that it has a message of this id already, at this place.
    fn judge(&self, subject: &str, answer: Answer) -> Result<Verdict, u64> {
        let failed = |kind, reason| Ok(Verdict::failed(kind, reason));
        let message = match answer {
            Answer::Message(message) => message,
            Answer::Denied(problem) => {
                return failed(
                    FailureKind::Transient,
                    format!("{problem}; give the user the permission to publish to it"),
                );
            }
            // Judged by whoever looks at the stream.
            Answer::NoResponders => return Ok(Verdict::Unknown(nobody_takes(subject))),
        };
        let stream = &self.options.stream;
        match read::<PubAck>(&message.payload) {
            Ok(ack) if ack.stream != *stream => {
                Ok(Verdict::Unknown(format!("it was confirmed by stream {:?}, and not by {stream:?}", ack.stream)))
            }
            Ok(ack) if ack.seq == 0 => Ok(Verdict::Unknown("its confirmation names no place in the stream".to_owned())),
            Ok(ack) if ack.duplicate => Err(ack.seq),
            Ok(_) => Ok(Verdict::Stored),
            Err(Unanswered::Refused(error)) => match error.err_code {
                ApiError::STREAM_NOT_EXPECTED => failed(
                    FailureKind::Transient,
                    format!("another stream than {stream:?} takes subject {subject:?}: {error}"),
                ),
                ApiError::MESSAGE_TOO_LARGE => failed(
                    FailureKind::Permanent,
                    format!("stream {stream:?} takes no message as large as this (max_msg_size): {error}"),
                ),
                ApiError::DUPLICATE_IN_PROGRESS => Ok(Verdict::Unknown(error.to_string())),
                // The stream or the account is full, has no leader, or was sealed: nothing that is about this message.
                _ if error.code >= 500 || error.err_code == ApiError::STORING_FAILED => {
                    failed(FailureKind::Busy, format!("stream {stream:?} did not store it: {error}"))
                }
                _ => failed(FailureKind::Transient, format!("stream {stream:?} refused it: {error}")),
            },
            Err(other) => Ok(Verdict::Unknown(other.to_string())),
        }
    }

    /// Whether the message that the server takes for stored is. Servers before 2.10 remember the id of one that they could not store.
    async fn original(&self, connection: &Connection, message: &Message, seq: u64, by: Instant) -> Verdict {
        let stream = &self.options.stream;
        match self.jetstream(connection, by).message(stream, seq).await {
            Ok(Some(found)) if found.header(headers::ID).as_deref() == Some(message.id.to_string().as_str()) => {
                Verdict::Stored
            }
            Ok(Some(_)) => Verdict::Unknown(format!(
                "the server takes it for a duplicate of message {seq} of stream {stream:?}, which is another one"
            )),
            // It was consumed, or has expired.
            Ok(None) if connection.info.is_at_least(2, 10) => Verdict::Stored,
            Ok(None) => Verdict::Unknown(format!(
                "the server takes it for a duplicate of message {seq} of stream {stream:?}, which is not there; NATS {} may say so of a \
                 message that it never stored",
                connection.info.version
            )),
            Err(error) => Verdict::Unknown(format!("look for the message that it is a duplicate of: {error}")),
        }
    }
}

fn nobody_takes(subject: &str) -> String {
    format!("nobody answers for subject {subject:?}")
}

#[async_trait]
impl Sink for NatsSink {
    fn system(&self) -> &'static str {
        "nats"
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
        let mut bytes = BytesMut::new();
        let mut pending = self.write(&connection, batch, &mut bytes, &mut verdicts);
        if pending.is_empty() {
            return Ok(verdicts);
        }
        match timeout_at(by, connection.send(bytes.freeze())).await {
            Ok(Ok(())) => {}
            Ok(Err(problem)) => return Err(self.unavailable(problem)),
            Err(_) => {
                self.leave(&connection, "the server takes nothing").await;
                return Err(
                    self.unavailable(format!("the server has taken nothing for {} s", self.deadline().as_secs()))
                );
            }
        }
        let answers = join_all(pending.iter_mut().map(|(_, _, pending)| pending.answer(by))).await;
        let silence =
            || connection.over().unwrap_or_else(|| format!("no answer within {} s", self.deadline().as_secs()));
        let (mut is_silent, mut unheard, mut duplicates) = (false, Vec::new(), Vec::new());
        let mut answered = false;
        for ((place, subject, _), answer) in pending.iter().zip(answers) {
            let Some(answer) = answer else {
                is_silent = true;
                verdicts.judge(*place, Verdict::Unknown(silence()));
                continue;
            };
            answered = true;
            if matches!(answer, Answer::NoResponders) {
                unheard.push((*place, subject.as_str()));
            }
            match self.judge(subject, answer) {
                Ok(verdict) => {
                    verdicts.judge(*place, verdict);
                }
                Err(seq) => duplicates.push((*place, seq)),
            }
        }
        for some in duplicates.chunks(LOOKED_UP_AT_ONCE) {
            let originals = join_all(some.iter().filter_map(|(place, seq)| {
                let message = batch.messages().get(*place)?;
                Some(async { (*place, self.original(&connection, message, *seq, by).await) })
            }));
            for (place, verdict) in originals.await {
                verdicts.judge(place, verdict);
            }
        }
        if !unheard.is_empty() {
            // A subject that no stream takes, or a server whose JetStream is away: then it is no message's fault.
            let stream = self.jetstream(&connection, by).stream(&self.options.stream).await;
            let stream = stream.map_err(|error| self.unavailable(error.to_string()));
            match stream {
                Ok(stream) if stream.cluster.as_ref().is_none_or(|cluster| cluster.leader.is_some()) => {
                    for (place, subject) in unheard {
                        let reason = format!(
                            "no stream takes subject {subject:?}; stream {:?} takes {}",
                            self.options.stream,
                            stream.config.subjects.join(", ")
                        );
                        verdicts.judge(place, Verdict::failed(FailureKind::Transient, reason));
                    }
                }
                Ok(_) => {}
                Err(error) if pending.len() == unheard.len() => {
                    self.leave(&connection, "its stream was not found").await;
                    return Err(error);
                }
                Err(_) => {}
            }
        }
        if is_silent {
            let why = silence();
            self.leave(&connection, &why).await;
            if !answered {
                return Err(self.unavailable(why));
            }
        }
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        let connection = self.connected().await?;
        // The server answers, and not only its socket.
        let by = Instant::now() + self.deadline();
        match self.jetstream(&connection, by).stream(&self.options.stream).await {
            Ok(_) => Ok(()),
            Err(error) => {
                self.leave(&connection, "a probe was not answered well").await;
                Err(self.unavailable(error.to_string()))
            }
        }
    }

    fn disconnected(&self) -> Option<String> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let why = last.as_ref()?.over()?;
        Some(format!("the connection to NATS at {} has ended: {why}", self.opened.shown))
    }

    async fn close(&self) {
        if let Some(connection) = self.connection.lock().await.take() {
            connection.kill("closed");
        }
    }
}
