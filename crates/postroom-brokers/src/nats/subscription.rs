//! Receiving: each session has a consumer of its own at the server, which begins behind the last message that the session before had acked.
//!
//! A consumer that goes on after its process died hands out new messages at once, and those that the process had not acked when their time
//! is over: later ones of a key before earlier ones. A new consumer has no such past. It is made before the old one is deleted, so that a
//! crash between the two forgets nothing; and whoever still holds the old one can settle nothing any more.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use postroom::{Answer, Arrival, Bound, Partition, Receipt, Received, Subscription, Unavailable};
use serde_json::json;
use tokio::sync::{Mutex, Notify, mpsc};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::connection::Connection;
use super::jetstream::{ApiError, ConsumerInfo, JetStream, Unanswered};
use super::protocol::{self, Inbound};
use super::sessions::{Begin, NatsSubscriptionOptions, Past};
use super::{Opened, headers};
use crate::OpenSubscriptionError;

/// A request for messages is made anew after so long; a process that hangs keeps its place for as long.
const PULL_EXPIRES: Duration = Duration::from_secs(10);
/// And it is lost if the server has not said by then that its time is over.
const PULL_LOST: Duration = Duration::from_secs(20);
/// After so long without an ack the server hands a message out again.
const ACK_WAIT: Duration = Duration::from_secs(60);
/// So often it is told that all of them are being worked on.
const EXTENDED_EVERY: Duration = Duration::from_secs(15);
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Numbers the sessions of all subscriptions of this process.
static SESSIONS: AtomicU64 = AtomicU64::new(1);

/// Receives from one stream.
pub struct NatsSubscription {
    options: NatsSubscriptionOptions,
    opened: Opened,
    /// Only `receive` waits on this one.
    opening: Mutex<()>,
    session: StdMutex<Option<Arc<Session>>>,
}

struct Session {
    number: u64,
    connection: Connection,
    /// What it is called at the server.
    consumer: String,
    held: StdMutex<Held>,
    arrived: Notify,
    settled: Notify,
    pump: StdMutex<Option<AbortHandle>>,
}

/// What was delivered.
#[derive(Default)]
struct Held {
    queue: VecDeque<Received>,
    /// By the number of the delivery: where the answer goes, and the bytes.
    unsettled: BTreeMap<u64, (String, u64)>,
    bytes: u64,
    over: Option<String>,
}

fn lock<T>(of: &StdMutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    fn end(&self, why: String) {
        lock(&self.held).over.get_or_insert(why);
        self.arrived.notify_one();
        // It holds the session, and with it the connection, while it waits.
        if let Some(pump) = lock(&self.pump).take() {
            pump.abort();
        }
    }

    fn over(&self) -> Option<String> {
        lock(&self.held).over.clone().or_else(|| self.connection.over())
    }

    /// What was delivered, as far as it fits.
    fn take(&self, max: Bound) -> Vec<Received> {
        let mut held = lock(&self.held);
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while let Some(next) = held.queue.front() {
            bytes += next.message.payload.len();
            if taken.len() >= max.messages || (!taken.is_empty() && bytes > max.bytes) {
                break;
            }
            taken.extend(held.queue.pop_front());
        }
        taken
    }
}

impl Drop for NatsSubscription {
    fn drop(&mut self) {
        if let Some(session) = lock(&self.session).take() {
            session.end("dropped".to_owned());
        }
    }
}

impl NatsSubscription {
    /// Checks the options; connects with the first `receive`.
    pub fn new(options: NatsSubscriptionOptions) -> Result<Self, OpenSubscriptionError> {
        let opened = options.opened().map_err(|problem| OpenSubscriptionError { kind: "nats", problem })?;
        Ok(Self { options, opened, opening: Mutex::default(), session: StdMutex::default() })
    }

    fn unavailable(&self, error: impl Into<postroom::BoxError>) -> Unavailable {
        let NatsSubscriptionOptions { stream, consumer, .. } = &self.options;
        let shown = &self.opened.shown;
        Unavailable::new(format!("consumer {consumer:?} of stream {stream:?} of NATS at {shown}"), error)
    }

    /// Connects and begins a session now; `receive` does it otherwise.
    pub async fn connect(&self) -> Result<(), Unavailable> {
        self.current().await.map(drop)
    }

    async fn current(&self) -> Result<Arc<Session>, Unavailable> {
        let _one = self.opening.lock().await;
        if let Some(session) = lock(&self.session).clone() {
            return Ok(session);
        }
        let session = self.begin().await.map_err(|problem| self.unavailable(problem))?;
        *lock(&self.session) = Some(session.clone());
        Ok(session)
    }

    /// Forgets a session that is over.
    fn leave(&self, session: &Arc<Session>) {
        let mut current = lock(&self.session);
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, session)) {
            *current = None;
        }
    }

    async fn begin(&self) -> Result<Arc<Session>, String> {
        let connection = self.opened.connect("postroom consumer").await?;
        let told = |error: Unanswered| error.to_string();
        let NatsSubscriptionOptions { stream, consumer, .. } = &self.options;
        let api = self.opened.api.as_str();
        let jetstream = JetStream { connection: &connection, api, by: Instant::now() + ANSWERS_WITHIN };
        let about = match jetstream.stream(stream).await {
            Err(Unanswered::Refused(error)) if error.err_code == ApiError::STREAM_NOT_FOUND => {
                return Err(format!("the stream does not exist; {}", super::check::advice_to_create(stream)));
            }
            other => other.map_err(told)?,
        };
        let before = self.options.sessions(&jetstream).await.map_err(|error| error.to_string())?;
        let last = before.last().map(|(_, last)| last);
        if let Some(last) = last.filter(|last| last.num_waiting > 0) {
            return Err(format!(
                "somebody else receives as {:?}; it is free when that one stops, or is gone",
                last.name
            ));
        }
        let takes_out = about.config.retention == "workqueue";
        let name = format!("{consumer}_{}", before.last().map_or(0, |(number, _)| *number).saturating_add(1));
        let (past, begin) = self.past(&jetstream, last, about.state.last_seq).await?;
        if takes_out {
            // Two may not take from one such stream, which itself is the list of what is not acked.
            for (_, old) in &before {
                jetstream.delete_consumer(stream, &old.name).await.map_err(told)?;
            }
        }
        let config = self.config(&name, &past, begin, takes_out);
        match jetstream.create_consumer(stream, &name, &config).await {
            Ok(_) => {}
            Err(Unanswered::Refused(error))
                if [ApiError::CONSUMER_EXISTS, ApiError::CONSUMER_IN_USE].contains(&error.err_code) =>
            {
                return Err(format!("somebody else has begun to receive just now: {error}"));
            }
            Err(error) => return Err(format!("create the consumer {name:?}: {error}")),
        }
        for (_, old) in before.iter().filter(|_| !takes_out) {
            jetstream.delete_consumer(stream, &old.name).await.map_err(told)?;
        }
        let prefetch = usize::from(self.options.prefetch);
        // Besides deliveries the server says when the time of a request is over.
        let (reply, deliveries) = connection.deliveries(prefetch * 2 + 64).await?;
        let seen = last.map_or(0, |last| last.delivered.stream_seq);
        let number = SESSIONS.fetch_add(1, Ordering::Relaxed);
        let session = Arc::new(Session {
            number,
            connection,
            consumer: name,
            held: StdMutex::default(),
            arrived: Notify::new(),
            settled: Notify::new(),
            pump: StdMutex::default(),
        });
        let pump = Pump {
            // A session that nobody has any more ends its pump.
            session: Arc::downgrade(&session),
            subject: format!("{api}.CONSUMER.MSG.NEXT.{stream}.{}", session.consumer),
            reply,
            prefetch,
            bytes_max: self.options.unsettled_bytes_max,
            seen,
            expected: 1,
            pull: None,
            pulls: 0,
            is_too_large: false,
        };
        *lock(&session.pump) = Some(tokio::spawn(pump.run(deliveries)).abort_handle());
        Ok(session)
    }

    /// What is known of earlier sessions, and where the next one begins.
    async fn past(
        &self,
        jetstream: &JetStream<'_>,
        last: Option<&ConsumerInfo>,
        last_seq: u64,
    ) -> Result<(Past, u64), String> {
        let stream = &self.options.stream;
        let Some(last) = last else {
            let begin = if self.options.begin == Begin::New { last_seq.saturating_add(1) } else { 1 };
            return Ok((Past { first: begin, anchor: (begin - 1, String::new()) }, begin));
        };
        let past = last.config.description.as_deref().and_then(Past::read);
        let past = past.unwrap_or(Past { first: 1, anchor: (0, String::new()) });
        let id_at = async |seq: u64| match jetstream.message(stream, seq).await {
            Ok(found) => Ok(found.and_then(|found| found.header(headers::ID)).unwrap_or_default()),
            Err(error) => Err(error.to_string()),
        };
        let begin = last.ack_floor.stream_seq.max(past.anchor.0).saturating_add(1);
        let (anchor, id) = &past.anchor;
        let went_back = begin > last_seq.saturating_add(1) || {
            let there = if id.is_empty() { String::new() } else { id_at(*anchor).await? };
            !there.is_empty() && there != *id
        };
        let begin = if went_back {
            let first = if past.first > last_seq.saturating_add(1) { 1 } else { past.first };
            tracing::warn!(
                "stream {stream:?} of NATS at {} went back: what consumer {:?} had received up to message {} is not what is there now; it receives \
                 again from message {first} on, and an inbox recognises what it had",
                self.opened.shown,
                self.options.consumer,
                begin - 1
            );
            first
        } else {
            begin
        };
        let anchor = begin - 1;
        let id = if anchor == 0 { String::new() } else { id_at(anchor).await? };
        // The id goes into a text of words.
        let id = if id.contains(|c: char| c.is_whitespace() || c.is_control()) || id.len() > 200 {
            String::new()
        } else {
            id
        };
        Ok((Past { first: past.first.min(begin), anchor: (anchor, id) }, begin))
    }

    /// The consumer of a session.
    fn config(&self, name: &str, past: &Past, begin: u64, takes_out: bool) -> serde_json::Value {
        let nanos = |time: Duration| time.as_nanos() as u64;
        let mut config = json!({
            "durable_name": name, "ack_policy": "explicit", "ack_wait": nanos(ACK_WAIT), "max_deliver": -1,
            "max_ack_pending": self.options.prefetch, "replay_policy": "instant", "description": past.written(),
        });
        match self.options.subjects.as_slice() {
            [] => {}
            [one] => config["filter_subject"] = one.as_str().into(),
            many => config["filter_subjects"] = json!(many),
        }
        if takes_out || begin <= 1 {
            config["deliver_policy"] = "all".into();
        } else {
            config["deliver_policy"] = "by_start_sequence".into();
            config["opt_start_seq"] = begin.into();
        }
        config
    }
}

/// Asks for messages, takes them in, and tells the server that they are being worked on.
struct Pump {
    session: std::sync::Weak<Session>,
    /// What messages are asked for on.
    subject: String,
    /// What the subjects of answers begin with.
    reply: String,
    prefetch: usize,
    bytes_max: u64,
    /// The last place in the stream that an earlier session was handed.
    seen: u64,
    /// The number of the next delivery: one that is missing got lost on the way.
    expected: u64,
    pull: Option<Pull>,
    pulls: u64,
    /// The next message is larger than what was asked for.
    is_too_large: bool,
}

/// A request that the server has.
struct Pull {
    number: u64,
    left: usize,
    lost_at: Instant,
}

impl Pump {
    async fn run(mut self, mut deliveries: mpsc::Receiver<Inbound>) {
        let mut extend = tokio::time::interval(EXTENDED_EVERY);
        extend.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let Some(session) = self.session.upgrade() else { return };
            if let Err(problem) = self.ask(&session).await {
                return session.end(problem);
            }
            let lost_at = self.pull.as_ref().map(|pull| pull.lost_at);
            let lost = async {
                match lost_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let taken = tokio::select! {
                inbound = deliveries.recv() => match inbound {
                    Some(inbound) => self.take(&session, inbound),
                    None => Err(session.connection.over().unwrap_or_else(|| "the connection has ended".to_owned())),
                },
                () = session.settled.notified() => Ok(()),
                _ = extend.tick() => self.extend(&session).await,
                () = lost => Err("the server has not answered a request for messages".to_owned()),
            };
            if let Err(problem) = taken {
                return session.end(problem);
            }
        }
    }

    /// Asks for more where nothing is asked for, and there is room.
    async fn ask(&mut self, session: &Session) -> Result<(), String> {
        let bytes = lock(&session.held).bytes;
        if self.pull.is_some() || bytes >= self.bytes_max || (self.is_too_large && bytes > 0) {
            return Ok(());
        }
        let expires = PULL_EXPIRES.as_nanos() as u64;
        let batch = if self.is_too_large { 1 } else { self.prefetch };
        let body = if self.is_too_large {
            json!({ "batch": batch, "expires": expires })
        } else {
            json!({ "batch": batch, "expires": expires, "max_bytes": self.bytes_max - bytes })
        };
        self.is_too_large = false;
        self.pulls += 1;
        let mut request = BytesMut::new();
        let reply = format!("{}{}", self.reply, self.pulls);
        protocol::publish(&mut request, &self.subject, Some(&reply), [], body.to_string().as_bytes());
        session.connection.send(request.freeze()).await?;
        self.pull = Some(Pull { number: self.pulls, left: batch, lost_at: Instant::now() + PULL_LOST });
        Ok(())
    }

    fn take(&mut self, session: &Session, inbound: Inbound) -> Result<(), String> {
        if let Some((code, text)) = inbound.status() {
            return self.said(&inbound, code, &text);
        }
        let place = inbound.reply.as_deref().and_then(Place::of);
        let (Some(place), Some(answer)) = (place, inbound.reply.clone()) else {
            return Err("a message came that says neither its place nor where its ack goes".to_owned());
        };
        if place.delivery != self.expected {
            // Going on would hand out later messages of a key before this one.
            return Err(format!(
                "delivery {} came, and {} was expected: one got lost on the way",
                place.delivery, self.expected
            ));
        }
        self.expected += 1;
        if let Some(pull) = &mut self.pull {
            pull.left -= 1;
            if pull.left == 0 {
                self.pull = None;
            }
        }
        // As the server counts.
        let bytes = (inbound.payload.len() + inbound.headers.len()) as u64;
        let receipt = Receipt::new(session.number, place.delivery);
        let redelivered = place.times > 1 || place.in_stream <= self.seen;
        let (id, message) = headers::received(inbound);
        let received = Received { receipt, partition: Partition::default(), redelivered, id, message };
        let mut held = lock(&session.held);
        held.unsettled.insert(place.delivery, (answer, bytes));
        held.bytes += bytes;
        held.queue.push_back(received);
        drop(held);
        session.arrived.notify_one();
        Ok(())
    }

    /// What the server says of a request. <https://docs.nats.io/reference/reference-protocols/nats_api_reference#fetching-from-a-pull-consumer>
    fn said(&mut self, inbound: &Inbound, code: u16, text: &str) -> Result<(), String> {
        let number = inbound.subject.strip_prefix(&self.reply).and_then(|number| number.parse::<u64>().ok());
        let is_current = number.is_some() && self.pull.as_ref().map(|pull| pull.number) == number;
        match code {
            // A sign of life.
            100 => return Ok(()),
            503 => {
                return Err(
                    "nobody answers a request for messages: the consumer or the stream has no leader now".to_owned()
                );
            }
            409 if text.contains("Consumer Deleted") => {
                return Err("its consumer was deleted: another process receives now, or an operator did it".to_owned());
            }
            409 if text.contains("MaxBytes") => self.is_too_large = true,
            409 if text.contains("Leadership") || text.contains("Shutdown") => {
                return Err(format!("the server says: {text}"));
            }
            404 | 408 | 409 => {}
            _ => return Err(format!("the server says: {code} {text}")),
        }
        if is_current {
            self.pull = None;
        }
        Ok(())
    }

    /// All that is not settled stays here for as long as the session lasts.
    async fn extend(&self, session: &Session) -> Result<(), String> {
        let mut bytes = BytesMut::new();
        for (answer, _) in lock(&session.held).unsettled.values() {
            protocol::publish(&mut bytes, answer, None, [], b"+WPI");
        }
        if bytes.is_empty() { Ok(()) } else { session.connection.send(bytes.freeze()).await }
    }
}

/// What the subject of an ack says of its message.
/// <https://docs.nats.io/reference/reference-protocols/nats_api_reference#jsapiconsumermsgnext-response>
#[derive(Debug, PartialEq, Eq)]
struct Place {
    /// How often it was delivered.
    times: u64,
    in_stream: u64,
    /// The number of this delivery.
    delivery: u64,
}

impl Place {
    /// `$JS.ACK.stream.consumer.times.place.delivery.time.pending`, with domain and account before the stream in its newer form.
    fn of(subject: &str) -> Option<Self> {
        let mut parts: Vec<&str> = subject.split('.').collect();
        if parts.len() >= 11 {
            parts.drain(2..4);
        }
        let number = |at: usize| parts.get(at)?.parse().ok();
        (parts.len() >= 9 && parts[..2] == ["$JS", "ACK"])
            .then(|| Some(Self { times: number(4)?, in_stream: number(5)?, delivery: number(6)? }))
            .flatten()
    }
}

#[async_trait]
impl Subscription for NatsSubscription {
    fn system(&self) -> &'static str {
        "nats"
    }

    fn origin(&self) -> String {
        format!("stream {:?}", self.options.stream)
    }

    fn is_connected(&self) -> bool {
        lock(&self.session).as_ref().is_some_and(|session| session.over().is_none())
    }

    async fn receive(&self, max: Bound) -> Result<Arrival, Unavailable> {
        let session = self.current().await?;
        loop {
            let taken = session.take(max);
            if !taken.is_empty() {
                return Ok(Arrival::Messages(taken));
            }
            if let Some(why) = session.over() {
                self.leave(&session);
                return Err(self.unavailable(why));
            }
            session.arrived.notified().await;
        }
    }

    async fn settle(&self, answers: &[(Receipt, Answer)]) -> Result<(), Unavailable> {
        let gone = || self.unavailable("the session that the message came in is over; it comes again");
        let session = lock(&self.session).clone().ok_or_else(gone)?;
        let mut bytes = BytesMut::new();
        let mut is_stale = false;
        {
            let mut held = lock(&session.held);
            for (receipt, answer) in answers {
                if receipt.session() != session.number {
                    is_stale = true;
                    continue;
                }
                // One that was settled already has no answer left.
                let Some((to, size)) = held.unsettled.remove(&receipt.number()) else { continue };
                held.bytes = held.bytes.saturating_sub(size);
                let word: &[u8] = match answer {
                    Answer::Ack => b"+ACK",
                    Answer::Requeue => b"-NAK",
                    Answer::Reject => b"+TERM",
                };
                protocol::publish(&mut bytes, &to, None, [], word);
            }
        }
        if !bytes.is_empty() {
            session.connection.send(bytes.freeze()).await.map_err(|problem| self.unavailable(problem))?;
            session.settled.notify_one();
        }
        if is_stale { Err(gone()) } else { Ok(()) }
    }

    async fn close(&self) {
        let Some(session) = lock(&self.session).take() else { return };
        // Behind all acks, so that the next session begins behind them.
        let by = Instant::now() + CLOSE_TIMEOUT;
        let jetstream = JetStream { connection: &session.connection, api: &self.opened.api, by };
        let _ = jetstream.consumer(&self.options.stream, &session.consumer).await;
        session.end("closed".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_of_a_message_is_read_in_both_forms() {
        let expected = Place { times: 2, in_stream: 30, delivery: 4 };
        assert_eq!(Place::of("$JS.ACK.ORDERS.billing_1.2.30.4.1700000000000000000.5").as_ref(), Some(&expected));
        let newer = "$JS.ACK.hub.ACC.ORDERS.billing_1.2.30.4.1700000000000000000.5.x";
        assert_eq!(Place::of(newer), Some(expected));
        assert_eq!(Place::of("_INBOX.x"), None);
        assert_eq!(Place::of("$JS.ACK.ORDERS.billing.x.y.z.1.1"), None);
    }
}
