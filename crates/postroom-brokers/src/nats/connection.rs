//! One connection to one server, which never comes back: what was handed to it and not answered is unknown, and is sent by nobody later.
//!
//! The usual client library of NATS keeps what is published while it is disconnected, and sends it when it is connected again. A relay that
//! has lost its lease meanwhile would so send old messages behind those of its successor (docs/decisions/0036).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;

use super::address::{Address, Credentials, Login};
use super::protocol::{self, Inbound, Info, Said};
use crate::tls;

const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// A server that has said nothing for three of them is gone.
const HEARTBEAT: Duration = Duration::from_secs(5);
const HEARTBEATS_UNANSWERED_MAX: u32 = 2;
/// Longest that one buffer may take.
const WRITTEN_WITHIN: Duration = Duration::from_secs(30);
/// Buffers on their way to the socket; whoever has more waits.
const OUTGOING_MAX: usize = 64;
/// The subscription that answers come to.
const ANSWERS: u64 = 1;
/// The subscription that deliveries come to.
const DELIVERIES: u64 = 2;

/// Who a client is.
pub(super) struct Client<'a> {
    /// What the server shows its operators.
    pub name: &'static str,
    pub credentials: Option<&'a Credentials>,
    /// Where answers come to, as far as the user's permissions say so.
    pub inbox_prefix: &'a str,
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// An open connection. Dropping it sends what was handed over, and ends it.
pub(super) struct Connection {
    outgoing: mpsc::Sender<Bytes>,
    shared: Arc<Shared>,
    tasks: [AbortHandle; 2],
    next: AtomicU64,
    pub info: Info,
    pub is_encrypted: bool,
}

struct Shared {
    /// What answers begin with; a number follows.
    inbox: String,
    waiting: Mutex<HashMap<u64, Waiting>>,
    /// Where deliveries go, and how many may lie there.
    deliveries: Mutex<Option<mpsc::Sender<Inbound>>>,
    /// Why it is over.
    over: watch::Sender<Option<String>>,
}

struct Waiting {
    subject: String,
    answer: oneshot::Sender<Answer>,
}

/// What became of a request.
#[derive(Debug)]
pub(super) enum Answer {
    Message(Inbound),
    /// Nobody listens on the subject.
    NoResponders,
    /// The user may not publish to it; with the server's words.
    Denied(String),
}

/// An answer that will come, or not. Dropping it forgets the request.
pub(super) struct Pending {
    number: u64,
    shared: Arc<Shared>,
    answer: oneshot::Receiver<Answer>,
}

impl Pending {
    /// The answer; none: none came by then, or the connection is over.
    pub async fn answer(&mut self, by: Instant) -> Option<Answer> {
        timeout_at(by, &mut self.answer).await.ok()?.ok()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        lock(&self.shared.waiting).remove(&self.number);
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connection {
    /// Connects to the first of these servers that can be reached.
    pub async fn open(addresses: &[Address], client: &Client<'_>) -> Result<Self, String> {
        let mut problems = Vec::new();
        for address in addresses {
            let at = format!("{}:{}", address.host, address.port);
            match timeout(CONNECT_WITHIN, Self::open_one(address, client)).await {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(problem)) => problems.push(format!("{at}: {problem}{}", tls::hint(&problem))),
                Err(_) => problems.push(format!("{at}: no answer within {} s", CONNECT_WITHIN.as_secs())),
            }
        }
        Err(problems.join("; "))
    }

    async fn open_one(address: &Address, client: &Client<'_>) -> Result<Self, String> {
        let told = |error: std::io::Error| error.to_string();
        let tcp = TcpStream::connect((address.host.as_str(), address.port)).await.map_err(told)?;
        tcp.set_nodelay(true).map_err(told)?;
        let mut read = BytesMut::with_capacity(64 << 10);
        let mut plain = tcp;
        let info = match said(&mut plain, &mut read).await? {
            Said::Info(info) => *info,
            other => return Err(format!("it began with {other:?}; does another program listen there?")),
        };
        if !info.headers {
            return Err(format!("server {} knows no headers; postroom needs NATS 2.2 or newer", info.version));
        }
        let is_encrypted = address.tls_required || info.tls_required;
        let mut stream: Box<dyn Stream> = if is_encrypted {
            if !info.tls_required && !info.tls_available {
                return Err("the url says tls://, and the server has no TLS".to_owned());
            }
            let config = address.files.read()?.client()?;
            let name =
                rustls::pki_types::ServerName::try_from(address.host.clone()).map_err(|error| error.to_string())?;
            let encrypted = TlsConnector::from(Arc::new(config)).connect(name, plain).await;
            Box::new(encrypted.map_err(|error| error.to_string())?)
        } else {
            Box::new(plain)
        };
        let shared = Arc::new(Shared {
            inbox: format!("{}.{}.", client.inbox_prefix, postroom::MessageId::new().to_string().replace('-', "")),
            waiting: Mutex::default(),
            deliveries: Mutex::default(),
            over: watch::Sender::new(None),
        });
        let greeting = greeting(address, client, &info, is_encrypted)?;
        let hello = format!("{greeting}SUB {}* {ANSWERS}\r\nPING\r\n", shared.inbox);
        stream.write_all(hello.as_bytes()).await.map_err(told)?;
        stream.flush().await.map_err(told)?;
        loop {
            match said(&mut stream, &mut read).await? {
                Said::Pong => break,
                Said::Error(error) => return Err(format!("the server refuses: {error}")),
                _ => {}
            }
        }
        let (outgoing, to_write) = mpsc::channel(OUTGOING_MAX);
        let (from, into) = tokio::io::split(stream);
        let reader = tokio::spawn(reading(from, read, shared.clone(), outgoing.downgrade()));
        let writer = tokio::spawn(writing(into, to_write, shared.clone(), reader.abort_handle()));
        let tasks = [reader.abort_handle(), writer.abort_handle()];
        Ok(Self { outgoing, shared, tasks, next: AtomicU64::new(0), info, is_encrypted })
    }

    /// Why it is over; none: it is open as far as anybody knows.
    pub fn over(&self) -> Option<String> {
        self.shared.over.borrow().clone()
    }

    /// Ends it now; nothing of what was handed over is sent any more.
    pub fn kill(&self, why: &str) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.shared.end(why);
    }

    /// Adds a request to `into`, which [`send`](Self::send) takes.
    pub fn request<'h>(
        &self,
        into: &mut BytesMut,
        subject: &str,
        headers: impl IntoIterator<Item = (&'h str, &'h str)>,
        payload: &[u8],
    ) -> Pending {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        let waiting = Waiting { subject: subject.to_owned(), answer: sender };
        lock(&self.shared.waiting).insert(number, waiting);
        let pending = Pending { number, shared: self.shared.clone(), answer };
        if self.over().is_some() {
            lock(&self.shared.waiting).remove(&number);
        }
        let reply = format!("{}{number}", self.shared.inbox);
        protocol::publish(into, subject, Some(&reply), headers, payload);
        pending
    }

    /// Hands bytes over, which are sent whole or, if it ends before, perhaps in part.
    pub async fn send(&self, bytes: Bytes) -> Result<(), String> {
        let gone = |_| self.over().unwrap_or_else(|| "the connection has ended".to_owned());
        self.outgoing.send(bytes).await.map_err(gone)
    }

    /// Asks once, and waits for the answer.
    pub async fn ask(&self, subject: &str, payload: &[u8], by: Instant) -> Result<Answer, String> {
        let mut bytes = BytesMut::new();
        let mut pending = self.request(&mut bytes, subject, [], payload);
        let sent = timeout_at(by, self.send(bytes.freeze())).await;
        sent.map_err(|_| "it takes nothing".to_owned())??;
        let silent = || self.over().unwrap_or_else(|| format!("no answer to {subject}"));
        pending.answer(by).await.ok_or_else(silent)
    }

    /// Where deliveries come to from now on, and what the subjects begin with that they must be sent to. More than `most` that nobody
    /// takes end the connection: no server sends more than it was asked for.
    pub async fn deliveries(&self, most: usize) -> Result<(String, mpsc::Receiver<Inbound>), String> {
        let (sender, receiver) = mpsc::channel(most);
        *lock(&self.shared.deliveries) = Some(sender);
        // Behind the answers' prefix, where the user may subscribe, and where no answer comes.
        let prefix = format!("{}deliveries.", self.shared.inbox);
        self.send(Bytes::from(format!("SUB {prefix}* {DELIVERIES}\r\n"))).await?;
        Ok((prefix, receiver))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The writer sends what it has, for a while, and then ends the reader.
        self.shared.end("closed");
    }
}

impl Shared {
    fn end(&self, why: &str) {
        self.over.send_if_modified(|over| {
            let first = over.is_none();
            over.get_or_insert_with(|| why.to_owned());
            first
        });
        lock(&self.waiting).clear();
        lock(&self.deliveries).take();
    }

    /// Takes what a server said. An error ends the connection.
    fn take(&self, message: Inbound) -> Result<(), String> {
        if message.sid == DELIVERIES {
            let deliveries = lock(&self.deliveries);
            let Some(deliveries) = &*deliveries else { return Ok(()) };
            return match deliveries.try_send(message) {
                Err(mpsc::error::TrySendError::Full(_)) => Err("it sends more than it was asked for".to_owned()),
                _ => Ok(()),
            };
        }
        let number = message.subject.strip_prefix(&self.inbox).and_then(|number| number.parse::<u64>().ok());
        if let Some(waiting) = number.and_then(|number| lock(&self.waiting).remove(&number)) {
            let answer = match message.status() {
                Some((503, _)) => Answer::NoResponders,
                _ => Answer::Message(message),
            };
            // Nobody waits for it any more: a late answer.
            let _ = waiting.answer.send(answer);
        }
        Ok(())
    }

    /// `Permissions Violation for Publish to "subject"`: the one error that is about a message and leaves the connection open.
    fn denied(&self, error: &str) -> bool {
        let is_about_publishing = error.to_ascii_lowercase().contains("permissions violation for publish to");
        let Some(subject) = error.split('"').nth(1).filter(|_| is_about_publishing) else { return false };
        let mut waiting = lock(&self.waiting);
        let numbers: Vec<u64> = waiting.iter().filter(|(_, one)| one.subject == subject).map(|(n, _)| *n).collect();
        for number in numbers {
            if let Some(one) = waiting.remove(&number) {
                let _ = one.answer.send(Answer::Denied(error.to_owned()));
            }
        }
        true
    }
}

fn greeting(address: &Address, client: &Client<'_>, info: &Info, is_encrypted: bool) -> Result<String, String> {
    let mut connect = json!({
        "verbose": false, "pedantic": false, "tls_required": is_encrypted, "headers": true, "no_responders": true,
        "lang": "rust", "version": env!("CARGO_PKG_VERSION"), "name": client.name, "protocol": 1,
    });
    match &address.login {
        Login::Nothing => {}
        Login::Password(user, password) => {
            connect["user"] = user.as_str().into();
            connect["pass"] = password.as_str().into();
        }
        Login::Token(token) => connect["auth_token"] = token.as_str().into(),
    }
    if let (Some(credentials), Some(nonce)) = (client.credentials, &info.nonce) {
        connect["jwt"] = credentials.jwt.as_str().into();
        connect["sig"] = credentials.sign(nonce)?.into();
    }
    Ok(format!("CONNECT {connect}\r\n"))
}

/// The next thing that a server says before there is anybody to read all of them.
async fn said(stream: &mut (impl AsyncRead + Unpin), read: &mut BytesMut) -> Result<Said, String> {
    loop {
        match protocol::next(read)? {
            Some(Said::Ping | Said::Fine) => {}
            Some(said) => return Ok(said),
            None => match stream.read_buf(read).await {
                Ok(0) => return Err("the server ended the connection".to_owned()),
                Ok(_) => {}
                Err(error) => return Err(error.to_string()),
            },
        }
    }
}

async fn writing(
    mut into: impl AsyncWrite + Unpin,
    mut outgoing: mpsc::Receiver<Bytes>,
    shared: Arc<Shared>,
    reader: AbortHandle,
) {
    while let Some(bytes) = outgoing.recv().await {
        let write = async {
            into.write_all(&bytes).await?;
            if outgoing.is_empty() { into.flush().await } else { Ok(()) }
        };
        let problem = match timeout(WRITTEN_WITHIN, write).await {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("the server has taken nothing for {} s", WRITTEN_WITHIN.as_secs()),
        };
        shared.end(&problem);
        break;
    }
    let _ = timeout(CONNECT_WITHIN, into.shutdown()).await;
    reader.abort();
}

async fn reading(
    mut from: impl AsyncRead + Unpin,
    mut read: BytesMut,
    shared: Arc<Shared>,
    outgoing: mpsc::WeakSender<Bytes>,
) {
    let mut heartbeat = tokio::time::interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    heartbeat.tick().await;
    let mut unanswered = 0;
    let why = 'over: loop {
        loop {
            match protocol::next(&mut read) {
                Ok(Some(Said::Message(message))) => {
                    if let Err(problem) = shared.take(message) {
                        break 'over problem;
                    }
                }
                Ok(Some(Said::Ping)) => say(&outgoing, "PONG\r\n"),
                Ok(Some(Said::Error(error))) if shared.denied(&error) => {
                    tracing::debug!("NATS refuses: {error}");
                }
                // Any other error is followed by the end of the connection, or means that it does not do what it was told.
                Ok(Some(Said::Error(error))) => break 'over format!("the server says: {error}"),
                Ok(Some(Said::Pong | Said::Fine | Said::Info(_))) => {}
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
                if unanswered >= HEARTBEATS_UNANSWERED_MAX {
                    break 'over format!("the server has said nothing for {} s", (HEARTBEAT * (unanswered + 1)).as_secs());
                }
                unanswered += 1;
                say(&outgoing, "PING\r\n");
            }
        }
    };
    shared.end(&why);
}

/// Without waiting: a queue that is full is written to the server anyway, which is a sign of life too.
fn say(outgoing: &mpsc::WeakSender<Bytes>, what: &'static str) {
    if let Some(outgoing) = outgoing.upgrade() {
        let _ = outgoing.try_send(Bytes::from_static(what.as_bytes()));
    }
}
