//! One connection to one server, which never comes back: what was handed to it and not answered is unknown, and is sent by nobody later.
//! (docs/decisions/0036 says why.)

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout, timeout_at};

use super::address::Address;
use super::resp::{Replies, Reply, command};
use crate::server_stream::{self, CONNECT_WITHIN, Stream};

/// A server that has said nothing for three of them is gone.
const HEARTBEAT: Duration = Duration::from_secs(5);
const HEARTBEATS_UNANSWERED_MAX: u32 = 2;
/// Longest that a part of a buffer may take.
const WRITTEN_WITHIN: Duration = Duration::from_secs(30);
const WRITTEN_AT_ONCE: usize = 64 << 10;

/// An open connection. Dropping it ends it.
pub(super) struct Connection {
    shared: Arc<Shared>,
    tasks: [AbortHandle; 2],
}

struct Shared {
    state: Mutex<State>,
    /// Counts what the server has taken: a sign of life too, while something large is on its way to it.
    taken: AtomicU64,
}

/// In one lock, so that requests wait for their answers in the order in which they are sent.
struct State {
    outgoing: mpsc::UnboundedSender<Bytes>,
    waiting: VecDeque<Waiting>,
    over: Option<String>,
}

/// Commands that were sent together.
struct Waiting {
    left: usize,
    /// None: nobody looks at them.
    to: Option<mpsc::UnboundedSender<Reply>>,
}

/// Commands to send together.
#[derive(Default)]
pub(super) struct Commands {
    bytes: BytesMut,
    count: usize,
}

impl Commands {
    pub fn add<A: AsRef<[u8]>>(&mut self, arguments: impl IntoIterator<Item = A, IntoIter: ExactSizeIterator>) {
        command(&mut self.bytes, arguments.into_iter());
        self.count += 1;
    }

    pub fn count(&self) -> usize {
        self.count
    }

    #[cfg(test)]
    pub fn written(self) -> BytesMut {
        self.bytes
    }
}

/// Answers that will come, or not.
pub(super) struct Pending {
    count: usize,
    replies: mpsc::UnboundedReceiver<Reply>,
}

impl Pending {
    /// The answers that came by then, in the order of the commands; fewer than commands: the others did not come, or the connection is over.
    pub async fn answers(&mut self, by: Instant) -> Vec<Reply> {
        let mut answers = Vec::with_capacity(self.count);
        while answers.len() < self.count {
            match timeout_at(by, self.replies.recv()).await {
                Ok(Some(reply)) => answers.push(reply),
                Ok(None) | Err(_) => break,
            }
        }
        answers
    }
}

fn lock(of: &Mutex<State>) -> MutexGuard<'_, State> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connection {
    /// Connects and logs in; `name` is what the server shows its operators.
    pub async fn open(address: &Address, name: &'static str) -> Result<Self, String> {
        let opening = async { Self::greet(server_stream::connected(&address.server).await?, address, name).await };
        server_stream::opened(&address.server, opening).await
    }

    async fn greet(stream: Box<dyn Stream>, address: &Address, name: &'static str) -> Result<Self, String> {
        let connection = Self::over(stream);
        let by = Instant::now() + CONNECT_WITHIN;
        let mut greeting = Commands::default();
        if !address.server.password.is_empty() {
            let login = [address.server.user.as_str(), address.server.password.as_str()];
            let without_user = usize::from(address.server.user.is_empty());
            greeting.add(["AUTH"].iter().chain(&login[without_user..]).collect::<Vec<_>>());
        }
        if address.database != 0 {
            greeting.add(["SELECT", &address.database.to_string()]);
        }
        let asked = greeting.count;
        greeting.add(["PING"]);
        let required = greeting.count;
        // A user may not be allowed to, which is no reason to send nothing.
        greeting.add(["CLIENT", "SETNAME", name]);
        let answers = connection.send(greeting).answers(by).await;
        let refused = answers.iter().take(required).enumerate().find_map(|(place, reply)| match reply {
            // Without the right to it: another command says then that it is missing. In another database than meant, none would.
            Reply::Error(error) if place >= asked && error.starts_with("NOPERM") => None,
            Reply::Error(error) => Some(format!("the server refuses: {error}")),
            _ => None,
        });
        match refused {
            Some(refused) => Err(refused),
            None if answers.len() < required => {
                Err(connection.why_over().unwrap_or_else(|| "no answer to the greeting".to_owned()))
            }
            None => Ok(connection),
        }
    }

    fn over(stream: Box<dyn Stream>) -> Self {
        let (outgoing, to_write) = mpsc::unbounded_channel();
        let state = State { outgoing, waiting: VecDeque::new(), over: None };
        let shared = Arc::new(Shared { state: Mutex::new(state), taken: AtomicU64::new(0) });
        let (from, into) = tokio::io::split(stream);
        let reader = tokio::spawn(reading(from, shared.clone()));
        let writer = tokio::spawn(writing(into, to_write, shared.clone(), reader.abort_handle()));
        Self { tasks: [reader.abort_handle(), writer.abort_handle()], shared }
    }

    /// Why it is over; none: it is open as far as anybody knows.
    pub fn why_over(&self) -> Option<String> {
        lock(&self.shared.state).over.clone()
    }

    /// Ends it now; nothing of what was handed over is sent any more.
    pub fn kill(&self, why: &str) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.shared.end(why);
    }

    /// Sends commands, each of which has an answer.
    pub fn send(&self, commands: Commands) -> Pending {
        let (to, replies) = mpsc::unbounded_channel();
        let Commands { bytes, count } = commands;
        self.shared.send(bytes.freeze(), Waiting { left: count, to: Some(to) });
        Pending { count, replies }
    }

    /// Sends one command, and waits for its answer. An error of the server's is an error here.
    pub async fn ask<A: AsRef<[u8]>>(
        &self,
        arguments: impl IntoIterator<Item = A, IntoIter: ExactSizeIterator>,
        by: Instant,
    ) -> Result<Reply, Unanswered> {
        let mut commands = Commands::default();
        commands.add(arguments);
        match self.send(commands).answers(by).await.pop() {
            Some(Reply::Error(error)) => Err(Unanswered::Refused(error)),
            Some(reply) => Ok(reply),
            None => Err(Unanswered::Silent(self.why_over().unwrap_or_else(|| "no answer in time".to_owned()))),
        }
    }
}

/// Why a command has no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unanswered {
    /// The server says no.
    #[error("the server says: {0}")]
    Refused(String),
    /// It says nothing, or the connection is over.
    #[error("{0}")]
    Silent(String),
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.kill("closed");
    }
}

impl Shared {
    fn send(&self, bytes: Bytes, waiting: Waiting) {
        let mut state = lock(&self.state);
        if state.over.is_none() && state.outgoing.send(bytes).is_ok() {
            state.waiting.push_back(waiting);
        }
    }

    fn end(&self, why: &str) {
        let mut state = lock(&self.state);
        state.over.get_or_insert_with(|| why.to_owned());
        state.waiting.clear();
    }

    /// Hands a reply to whoever waits for it.
    fn take(&self, reply: Reply) -> Result<(), String> {
        let mut state = lock(&self.state);
        let waiting = state.waiting.front_mut().ok_or_else(|| match &reply {
            // Such as: too many clients.
            Reply::Error(error) => format!("the server says: {error}"),
            _ => "it answers what it was not asked".to_owned(),
        })?;
        // Nobody waits for it any more: a late answer.
        let _ = waiting.to.as_ref().map(|to| to.send(reply));
        waiting.left -= 1;
        if waiting.left == 0 {
            state.waiting.pop_front();
        }
        Ok(())
    }
}

async fn writing(
    mut into: impl AsyncWrite + Unpin,
    mut outgoing: mpsc::UnboundedReceiver<Bytes>,
    shared: Arc<Shared>,
    reader: AbortHandle,
) {
    while let Some(bytes) = outgoing.recv().await {
        for some in bytes.chunks(WRITTEN_AT_ONCE) {
            let problem = match timeout(WRITTEN_WITHIN, into.write_all(some)).await {
                Ok(Ok(())) => {
                    shared.taken.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("the server has taken nothing for {} s", WRITTEN_WITHIN.as_secs()),
            };
            shared.end(&problem);
            return reader.abort();
        }
        if outgoing.is_empty()
            && let Err(error) = into.flush().await
        {
            shared.end(&error.to_string());
            break;
        }
    }
    reader.abort();
}

async fn reading(mut from: impl AsyncRead + Unpin, shared: Arc<Shared>) {
    let mut heartbeat = tokio::time::interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    heartbeat.tick().await;
    let (mut read, mut replies) = (BytesMut::with_capacity(64 << 10), Replies::default());
    let (mut unanswered, mut taken) = (0, 0);
    let why = 'over: loop {
        loop {
            match replies.next(&mut read) {
                Ok(Some(reply)) => {
                    if let Err(problem) = shared.take(reply) {
                        break 'over problem;
                    }
                }
                Ok(None) => break,
                Err(problem) => break 'over problem,
            }
        }
        tokio::select! {
            came = from.read_buf(&mut read) => match came {
                Ok(0) => break 'over "the server ended the connection".to_owned(),
                Ok(_) => unanswered = 0,
                Err(error) => break 'over error.to_string(),
            },
            _ = heartbeat.tick() => {
                let now = shared.taken.load(Ordering::Relaxed);
                if std::mem::replace(&mut taken, now) != now {
                    unanswered = 0;
                }
                if unanswered >= HEARTBEATS_UNANSWERED_MAX {
                    break 'over format!("the server has said nothing for {} s", (HEARTBEAT * (unanswered + 1)).as_secs());
                }
                unanswered += 1;
                let mut ping = Commands::default();
                ping.add(["PING"]);
                shared.send(ping.bytes.freeze(), Waiting { left: ping.count, to: None });
            }
        }
    };
    shared.end(&why);
}
