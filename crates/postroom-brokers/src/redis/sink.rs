//! Publishing: a batch is one write, and each message has its own answer.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Batch, FailureKind, Sink, SinkLimits, Unavailable, Verdict, Verdicts, redact_url};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;

use super::address::Address;
use super::connection::{Commands, Connection, Unanswered};
use super::resp::{Reply, STRING_MAX};
use super::{RedisOptions, entry};
use crate::OpenSinkError;
use crate::template::Template;

/// A batch is in memory twice while it is on its way.
const BATCH_BYTES_MAX: usize = 16 << 20;
/// Longest that a server waits for its disk or its replicas, during which it answers nothing else on the connection.
const WAITS_AT_MOST: Duration = Duration::from_secs(5);

/// Adds messages to streams of one server.
pub struct RedisSink {
    options: RedisOptions,
    address: Address,
    stream: Template,
    turns: Semaphore,
    connection: Mutex<Option<Arc<Connection>>>,
    /// The connection, to be looked at without waiting for it.
    last: std::sync::Mutex<Option<Arc<Connection>>>,
}

impl RedisSink {
    /// Checks the options; connects with the first probe or batch.
    pub fn new(options: RedisOptions) -> Result<Self, OpenSinkError> {
        let (address, stream) = options.opened().map_err(|problem| OpenSinkError { kind: "redis", problem })?;
        let turns = Semaphore::new(options.batches_in_flight_max);
        Ok(Self { options, address, stream, turns, connection: Mutex::default(), last: Default::default() })
    }

    fn unavailable(&self, error: impl Into<postroom::BoxError>) -> Unavailable {
        Unavailable::new(format!("Redis at {}", redact_url(&self.options.url)), error)
    }

    fn deadline(&self) -> Duration {
        Duration::from_secs(self.options.publish_deadline_seconds)
    }

    /// A connection to a server that keeps what is asked for.
    async fn connected(&self) -> Result<Arc<Connection>, Unavailable> {
        let mut slot = self.connection.lock().await;
        if let Some(connection) = slot.as_ref().filter(|connection| connection.why_over().is_none()) {
            return Ok(connection.clone());
        }
        *slot = None;
        let opened = Connection::open(&self.address, "postroom-relay").await;
        let connection = Arc::new(opened.map_err(|problem| self.unavailable(problem))?);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection.clone());
        self.keeps(&connection).await.map_err(|problem| self.unavailable(problem))?;
        *slot = Some(connection.clone());
        Ok(connection)
    }

    /// Nothing is added while there are too few replicas, or no file on the disk: that would be added again and again. One that hangs is only
    /// noticed by what is added.
    pub(super) async fn keeps(&self, connection: &Connection) -> Result<(), String> {
        let Some(waiting) = self.waiting() else { return Ok(()) };
        let reply = connection.ask(waiting, Instant::now() + WAITS_AT_MOST * 2).await;
        let reply = reply.map_err(|error| match &error {
            Unanswered::Refused(said) if said.contains("unknown command") => {
                format!("synced = true needs WAITAOF, which came with Redis 7.2 ({error})")
            }
            _ => error.to_string(),
        })?;
        self.confirmed(Some(&reply))
    }

    /// The command that waits for its disk or its replicas, where that is asked for.
    fn waiting(&self) -> Option<Vec<String>> {
        let ms = WAITS_AT_MOST.min(self.deadline() / 4).as_millis().to_string();
        let replicas = self.options.replicas.to_string();
        match (self.options.synced, self.options.replicas) {
            (true, _) => Some(vec!["WAITAOF".to_owned(), "1".to_owned(), replicas, ms]),
            (false, 0) => None,
            (false, _) => Some(vec!["WAIT".to_owned(), replicas, ms]),
        }
    }

    /// Whether its answer says that what was added is where it must be.
    fn confirmed(&self, reply: Option<&Reply>) -> Result<(), String> {
        let (disk, replicas) = match reply {
            Some(Reply::Number(replicas)) => (1, *replicas),
            Some(Reply::Array(counts)) => match counts.as_slice() {
                [Reply::Number(disk), Reply::Number(replicas)] => (*disk, *replicas),
                _ => return Err("an answer of another shape".to_owned()),
            },
            Some(Reply::Error(error)) => return Err(format!("the server says: {error}")),
            _ => return Err("no answer".to_owned()),
        };
        let wanted = self.options.replicas;
        if self.options.synced && disk < 1 {
            Err("the server's disk has not confirmed it in time".to_owned())
        } else if replicas < i64::from(wanted) {
            Err(format!("{replicas} of {wanted} replicas have confirmed it in time"))
        } else {
            Ok(())
        }
    }

    /// Ends a connection that did not answer in time, or whose server is not to be used: what is on it is sent by nobody later.
    async fn leave(&self, connection: &Arc<Connection>, why: &str) {
        connection.kill(why);
        let mut slot = self.connection.lock().await;
        if slot.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection)) {
            *slot = None;
        }
    }

    /// The commands of all messages that can be added, and the places in the batch that they belong to.
    fn write(&self, batch: &Batch, verdicts: &mut Verdicts) -> (Commands, Vec<(usize, String)>) {
        let (mut commands, mut places) = (Commands::default(), Vec::with_capacity(batch.messages().len()));
        for (place, message) in batch.messages().iter().enumerate() {
            let stream = match entry::stream(&self.stream, message) {
                Ok(_) if message.payload.len() > STRING_MAX => {
                    let size = message.payload.len();
                    Err(format!("the payload has {size} bytes, and Redis takes {STRING_MAX}"))
                }
                stream => stream,
            };
            match stream {
                Ok(stream) => {
                    entry::add(&mut commands, &stream, message);
                    places.push((place, stream));
                }
                Err(reason) => {
                    verdicts.judge(place, Verdict::failed(FailureKind::Permanent, reason));
                }
            }
        }
        (commands, places)
    }
}

/// What the answer to an `XADD` means.
fn judge(stream: &str, answer: &Reply) -> Verdict {
    match answer {
        Reply::Text(_) => Verdict::Stored,
        Reply::Error(error) => {
            let kind = if is_about_the_server(error) { FailureKind::Busy } else { FailureKind::Transient };
            let what = if error.starts_with("WRONGTYPE") { " (the key is there, and is no stream)" } else { "" };
            Verdict::failed(kind, format!("stream {stream:?}: the server says: {error}{what}{}", advice(error)))
        }
        _ => Verdict::Unknown(format!("stream {stream:?}: an answer of another shape")),
    }
}

/// It takes nothing of anybody for now: its memory is full, it loads its data, it is no primary any more.
fn is_about_the_server(error: &str) -> bool {
    let code = error.split(' ').next().unwrap_or_default();
    matches!(
        code,
        "OOM"
            | "NOREPLICAS"
            | "MISCONF"
            | "LOADING"
            | "MASTERDOWN"
            | "CLUSTERDOWN"
            | "TRYAGAIN"
            | "BUSY"
            | "READONLY"
            | "UNBLOCKED"
            | "NOAUTH"
            | "MOVED"
            | "ASK"
    )
}

/// Another server is to be asked, or this one anew.
fn is_about_the_connection(error: &str) -> bool {
    ["READONLY", "NOAUTH", "MOVED", "ASK"].iter().any(|code| error.starts_with(code))
}

/// What to do, where a person can do something.
pub(super) fn advice(error: &str) -> &'static str {
    match error.split(' ').next().unwrap_or_default() {
        "OOM" => "; make room, or raise maxmemory",
        "READONLY" => "; this is a replica: name the primary in the url",
        "MOVED" | "ASK" | "CROSSSLOT" => "; this is a part of a cluster, whose nodes postroom does not look for",
        "NOPERM" => "; docs/redis.md lists what the user needs",
        _ => "",
    }
}

#[async_trait]
impl Sink for RedisSink {
    fn system(&self) -> &'static str {
        "redis"
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
        let (mut commands, places) = self.write(batch, &mut verdicts);
        if places.is_empty() {
            return Ok(verdicts);
        }
        let waiting = self.waiting();
        waiting.into_iter().for_each(|waiting| commands.add(waiting));
        let expected = commands.count();
        let answers = connection.send(commands).answers(by).await;
        if answers.len() < expected {
            let silence = format!("no answer within {} s", self.deadline().as_secs());
            let why = connection.why_over().unwrap_or(silence);
            self.leave(&connection, &why).await;
            if answers.is_empty() {
                return Err(self.unavailable(why));
            }
            places.iter().for_each(|(place, _)| {
                verdicts.judge(*place, Verdict::Unknown(why.clone()));
            });
        }
        let kept = if expected > places.len() { self.confirmed(answers.get(places.len())) } else { Ok(()) };
        for ((place, stream), answer) in places.iter().zip(&answers) {
            let verdict = match (judge(stream, answer), &kept) {
                (Verdict::Stored, Err(problem)) => Verdict::Unknown(format!("stream {stream:?} has it, but {problem}")),
                (verdict, _) => verdict,
            };
            verdicts.judge(*place, verdict);
        }
        let leaves = answers.iter().find_map(|answer| match answer {
            Reply::Error(error) if is_about_the_connection(error) => Some(error.clone()),
            _ => None,
        });
        // The next connection looks first whether what is asked for can be had.
        if let Some(why) = leaves.or(kept.err()) {
            self.leave(&connection, &why).await;
        }
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        let connection = self.connected().await?;
        let Err(error) = connection.ask(["PING"], Instant::now() + self.deadline()).await else { return Ok(()) };
        self.leave(&connection, "a probe was not answered well").await;
        Err(self.unavailable(error.to_string()))
    }

    fn disconnected(&self) -> Option<String> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let why = last.as_ref()?.why_over()?;
        Some(format!("the connection to Redis at {} has ended: {why}", redact_url(&self.options.url)))
    }

    async fn close(&self) {
        if let Some(connection) = self.connection.lock().await.take() {
            connection.kill("closed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_the_server_is_no_fault_of_a_message() {
        let kind = |error: &str| match judge("s", &Reply::Error(error.to_owned())) {
            Verdict::Failed(failure) => failure.kind,
            other => panic!("{other:?}"),
        };
        for error in ["OOM command not allowed", "LOADING Redis is loading", "READONLY You can't write", "NOREPLICAS x"]
        {
            assert_eq!(kind(error), FailureKind::Busy, "{error}");
        }
        for error in ["WRONGTYPE Operation", "NOPERM this user has no permissions", "ERR unknown"] {
            assert_eq!(kind(error), FailureKind::Transient, "{error}");
        }
        assert!(matches!(judge("s", &Reply::Nothing), Verdict::Unknown(_)));
    }

    #[test]
    fn fewer_confirmations_than_asked_for_are_told() {
        let sink = |replicas, synced| {
            RedisSink::new(RedisOptions { replicas, synced, ..RedisOptions::new("redis://h", "s") }).unwrap()
        };
        let pair = |disk, replicas| Reply::Array(vec![Reply::Number(disk), Reply::Number(replicas)]);
        assert!(sink(2, false).confirmed(Some(&Reply::Number(1))).unwrap_err().contains("1 of 2"));
        assert!(sink(2, false).confirmed(Some(&Reply::Number(2))).is_ok());
        assert!(sink(0, true).confirmed(Some(&pair(0, 0))).unwrap_err().contains("disk"));
        assert!(
            sink(1, true).confirmed(Some(&pair(1, 0))).is_err() && sink(1, true).confirmed(Some(&pair(1, 1))).is_ok()
        );
        assert!(sink(1, false).confirmed(None).is_err());
        assert_eq!(sink(0, false).waiting(), None);
    }
}
