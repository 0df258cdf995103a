//! Publishing: mails over connections that are kept for the next one.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use postroom::{Batch, BoxError, FailureKind, Sink, SinkLimits, Unavailable, Verdict, Verdicts, redact_url};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::SmtpOptions;
use super::connection::{Connection, Of, Sent};
use super::mail::{self, Letter, Sender};
use super::reply::Reply;
use crate::OpenSinkError;
use crate::server_address::ServerAddress;

/// A batch is in memory twice while it is on its way.
const BATCH_BYTES_MAX: usize = 16 << 20;

/// Sends mails by one server.
pub struct SmtpSink {
    options: SmtpOptions,
    server: ServerAddress,
    sender: Sender,
    turns: Semaphore,
    idle: Mutex<Vec<Connection>>,
}

impl SmtpSink {
    /// Checks the options; connects with the first probe or batch.
    pub fn new(options: SmtpOptions) -> Result<Self, OpenSinkError> {
        let (server, sender) = options.opened().map_err(|problem| OpenSinkError { kind: "smtp", problem })?;
        let turns = Semaphore::new(options.mails_in_flight_max);
        Ok(Self { options, server, sender, turns, idle: Mutex::default() })
    }

    fn unavailable(&self, error: impl Into<BoxError>) -> Unavailable {
        Unavailable::new(format!("the mail server {}", redact_url(&self.options.url)), error)
    }

    fn deadline(&self) -> Duration {
        Duration::from_secs(self.options.publish_deadline_seconds)
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connected(&self) -> Result<Connection, Unavailable> {
        loop {
            let Some(mut connection) = self.idle().pop() else { break };
            if connection.is_there().await {
                return Ok(connection);
            }
        }
        let in_clear = self.options.may_be_in_clear(&self.server);
        Connection::open(&self.server, in_clear).await.map_err(|problem| self.unavailable(problem))
    }
}

/// What a refusal means; none: it is no message's fault, and the server has to be asked later. `ours`: the sender is the route's.
fn judge(of: &Of, reply: &Reply, ours: bool) -> Option<Verdict> {
    let kind = match (reply.code, of) {
        // It asks for a login, or for a better one.
        (530 | 534 | 535 | 538, _) => return None,
        (421 | 451 | 452 | 454, _) => FailureKind::Busy,
        (400..500, _) => FailureKind::Transient,
        // Too large: said with the sender, and of the mail.
        (552, _) => FailureKind::Permanent,
        (_, Of::Sender(_)) if ours => return None,
        _ => FailureKind::Permanent,
    };
    Some(Verdict::failed(kind, format!("{of} is refused: {reply}")))
}

#[async_trait]
impl Sink for SmtpSink {
    fn system(&self) -> &'static str {
        "smtp"
    }

    fn limits(&self) -> SinkLimits {
        SinkLimits {
            // What is known of one mail must not wait for the next.
            batch_messages_max: 1,
            batch_bytes_max: BATCH_BYTES_MAX,
            batches_in_flight_max: self.options.mails_in_flight_max,
        }
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let _turn = self.turns.acquire().await.map_err(|error| self.unavailable(error))?;
        let mut connection = self.connected().await?;
        let by = Instant::now() + self.deadline();
        let mut verdicts = batch.silent();
        let mut failed_keys = HashSet::new();
        let (mut answered, mut over) = (0, None);
        for (place, message) in batch.messages().iter().enumerate() {
            let key = message.ordering_key();
            let late = Instant::now() >= by;
            if late && over.is_none() {
                over = Some("the mails before it took longer than publish_deadline_seconds".to_owned());
            }
            if over.is_some() || key.is_some_and(|key| failed_keys.contains(key)) {
                verdicts.judge(place, Verdict::NotSent);
                continue;
            }
            let verdict = match mail::letter(&self.sender, message, SystemTime::now()) {
                Err(reason) => Verdict::failed(FailureKind::Permanent, reason),
                Ok(letter) => match not_taken(&connection, &letter) {
                    Some(reason) => Verdict::failed(FailureKind::Permanent, reason),
                    None => match connection.send(&letter, self.deadline()).await {
                        Sent::Taken => Verdict::Stored,
                        Sent::Refused(of, reply) => {
                            judge(&of, &reply, self.sender.is(&letter.from)).unwrap_or_else(|| {
                                over = Some(format!("{of} is refused: {reply}"));
                                Verdict::NotSent
                            })
                        }
                        Sent::Unsent(problem) => {
                            over = Some(problem);
                            Verdict::NotSent
                        }
                        Sent::Unknown(problem) => {
                            over = Some(problem.clone());
                            Verdict::Unknown(problem)
                        }
                    },
                },
            };
            if verdict != Verdict::Stored {
                failed_keys.extend(key);
            }
            answered += usize::from(matches!(verdict, Verdict::Stored | Verdict::Failed(_)));
            verdicts.judge(place, verdict);
        }
        match over {
            None => {
                self.idle().push(connection);
                Ok(verdicts)
            }
            Some(why) if answered == 0 => Err(self.unavailable(why)),
            Some(_) => Ok(verdicts),
        }
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        let connection = self.connected().await?;
        self.idle().push(connection);
        Ok(())
    }

    async fn close(&self) {
        let idle = std::mem::take(&mut *self.idle());
        for connection in idle {
            connection.leave().await;
        }
    }
}

/// What the server would refuse, before it has been sent.
fn not_taken(connection: &Connection, letter: &Letter) -> Option<String> {
    let Letter { from, to, bytes } = letter;
    let extensions = &connection.extensions;
    if let Some(most) = extensions.size.filter(|most| bytes.len() as u64 > *most) {
        return Some(format!("as a mail it has {} bytes, and the server takes {most} (SIZE)", bytes.len()));
    }
    if !extensions.utf8_addresses && to.iter().chain([from]).any(|address| !address.to_string().is_ascii()) {
        return Some("an address of it is not ASCII, and the server takes no other ones (SMTPUTF8)".to_owned());
    }
    if !extensions.eight_bit && !bytes.is_ascii() {
        return Some("as a mail it has bytes that are not ASCII, and the server takes none (8BITMIME)".to_owned());
    }
    None
}
