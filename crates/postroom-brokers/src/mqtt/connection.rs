//! One connection to one broker, which never comes back: what was handed to it and not acked is unknown, and is sent by nobody later.
//! (docs/decisions/0036 says why.)

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::packet::{self, Connack, Connect, Packet, Publish, Reason};
use crate::server_address::ServerAddress;
use crate::server_stream::{self, Stream, WRITTEN_WITHIN};

/// A broker that has said nothing for three of them is gone.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(5);
pub(super) const HEARTBEATS_UNANSWERED_MAX: u32 = 2;
/// What the broker is told: it gives up a client that is silent for half as long again.
pub(super) const KEEP_ALIVE_SECONDS: u16 = 20;
const WRITTEN_AT_ONCE: usize = 64 << 10;

/// Connects and says who it is. Returns also what came behind the answer.
pub(super) async fn opened(
    address: &ServerAddress,
    connect: &Connect<'_>,
) -> Result<(Box<dyn Stream>, BytesMut, Connack), String> {
    let opening = async {
        let mut stream = server_stream::connected(address).await?;
        let mut greeting = BytesMut::new();
        packet::connect(&mut greeting, connect);
        stream.write_all(&greeting).await.map_err(|error| error.to_string())?;
        let mut read = BytesMut::new();
        loop {
            match packet::next(&mut read)? {
                Some(Packet::Connack(connack)) if connack.reason.code == 0 => {
                    return Ok((stream, read, connack));
                }
                Some(Packet::Connack(Connack { reason, .. })) => return Err(format!("the broker refuses: {reason}")),
                Some(_) => return Err("the broker's first packet is no answer".to_owned()),
                None => {}
            }
            // Nothing else may come before a client has said what it is here for.
            if stream.read_buf(&mut read).await.map_err(|error| error.to_string())? == 0 {
                return Err("the server ended the connection (does it speak MQTT 5?)".to_owned());
            }
        }
    };
    server_stream::opened(address, opening).await
}

/// How often the broker must hear something.
pub(super) fn heartbeat(connack: &Connack) -> Duration {
    let half = Duration::from_secs(u64::from(connack.keep_alive_seconds.unwrap_or(KEEP_ALIVE_SECONDS))) / 2;
    if half.is_zero() { HEARTBEAT } else { HEARTBEAT.min(half) }
}

/// An open connection that publishes. Dropping it ends it.
pub(super) struct Connection {
    shared: Arc<Shared>,
    /// How many more messages the broker takes before it has acked some.
    window: Arc<Semaphore>,
    pub connack: Connack,
    /// It ends by itself.
    left: AtomicBool,
    tasks: [AbortHandle; 2],
}

struct Shared(Mutex<State>, Arc<Semaphore>);

/// In one lock, so that messages are sent in the order in which they got their packet ids.
struct State {
    outgoing: mpsc::UnboundedSender<Bytes>,
    waiting: HashMap<u16, oneshot::Sender<Reason>>,
    last_id: u16,
    over: Option<String>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, why: &str) {
        let mut state = self.state();
        state.over.get_or_insert_with(|| why.to_owned());
        state.waiting.clear();
        // The writer ends with what it has.
        state.outgoing = mpsc::unbounded_channel().0;
        self.1.close();
    }
}

impl Connection {
    /// Connects; nothing of an earlier session is kept.
    pub async fn open(address: &ServerAddress, client_id: &str) -> Result<Self, String> {
        let connect = Connect {
            client_id,
            clean_start: true,
            keep_alive_seconds: KEEP_ALIVE_SECONDS,
            session_expiry_seconds: 0,
            receive_maximum: 1,
            user: &address.user,
            password: &address.password,
        };
        let (stream, read, connack) = opened(address, &connect).await?;
        if connack.maximum_qos == 0 {
            return Err("the broker confirms nothing: it has only QoS 0".to_owned());
        }
        let (outgoing, to_write) = mpsc::unbounded_channel();
        let window = Arc::new(Semaphore::new(connack.receive_maximum.into()));
        let state = State { outgoing, waiting: HashMap::new(), last_id: 0, over: None };
        let shared = Arc::new(Shared(Mutex::new(state), window.clone()));
        let (from, into) = tokio::io::split(stream);
        let reader = tokio::spawn(reading((from, read), shared.clone(), heartbeat(&connack)));
        let writer = tokio::spawn(writing(into, to_write, shared.clone(), reader.abort_handle()));
        Ok(Self {
            tasks: [reader.abort_handle(), writer.abort_handle()],
            shared,
            window,
            connack,
            left: AtomicBool::new(false),
        })
    }

    /// Why it is over; none: it is open as far as anybody knows.
    pub fn why_over(&self) -> Option<String> {
        self.shared.state().over.clone()
    }

    /// Ends it now; nothing of what was handed over is sent any more.
    pub fn kill(&self, why: &str) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.shared.end(why);
    }

    /// Sends a message when the broker takes one more. Returns what will be its ack; none: the connection is over.
    pub async fn publish(&self, publication: &Publish) -> Option<oneshot::Receiver<Reason>> {
        self.window.acquire().await.ok()?.forget();
        let (to, ack) = oneshot::channel();
        let mut state = self.shared.state();
        if state.over.is_some() {
            return None;
        }
        let id = (1..=u16::MAX)
            .map(|step| state.last_id.wrapping_add(step))
            .find(|id| *id != 0 && !state.waiting.contains_key(id));
        // There are more ids than messages in the window.
        let id = id?;
        state.last_id = id;
        let mut written = BytesMut::with_capacity(publication.payload.len() + 512);
        packet::publish(&mut written, &Publish { packet_id: Some(id), ..publication.clone() });
        state.waiting.insert(id, to);
        state.outgoing.send(written.freeze()).ok()?;
        Some(ack)
    }

    /// Says farewell and ends it. What nobody waits for any more, and has no ack, is not sent then.
    pub fn leave(&self) {
        if !self.shared.state().waiting.is_empty() {
            return self.kill("closed");
        }
        self.left.store(true, Ordering::Relaxed);
        let mut farewell = BytesMut::new();
        packet::disconnect(&mut farewell);
        let mut state = self.shared.state();
        let _ = state.outgoing.send(farewell.freeze());
        // The writer ends with what it has, and ends the reader.
        state.outgoing = mpsc::unbounded_channel().0;
        state.over.get_or_insert_with(|| "closed".to_owned());
        state.waiting.clear();
        drop(state);
        self.window.close();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.left.load(Ordering::Relaxed) {
            self.kill("closed");
        }
    }
}

async fn writing(
    mut into: impl AsyncWrite + Unpin,
    mut outgoing: mpsc::UnboundedReceiver<Bytes>,
    shared: Arc<Shared>,
    reader: AbortHandle,
) {
    let mut together = BytesMut::new();
    while let Some(bytes) = outgoing.recv().await {
        together.extend_from_slice(&bytes);
        while together.len() < WRITTEN_AT_ONCE
            && let Ok(more) = outgoing.try_recv()
        {
            together.extend_from_slice(&more);
        }
        for some in together.chunks(WRITTEN_AT_ONCE) {
            let problem = match timeout(WRITTEN_WITHIN, into.write_all(some)).await {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("the broker has taken nothing for {} s", WRITTEN_WITHIN.as_secs()),
            };
            shared.end(&problem);
            return reader.abort();
        }
        together.clear();
        if let Err(error) = into.flush().await {
            shared.end(&error.to_string());
            break;
        }
    }
    let _ = timeout(WRITTEN_WITHIN, into.shutdown()).await;
    reader.abort();
}

async fn reading((mut from, mut read): (impl AsyncRead + Unpin, BytesMut), shared: Arc<Shared>, every: Duration) {
    let mut heartbeat = interval(every);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    heartbeat.tick().await;
    let mut unanswered = 0;
    let why = 'over: loop {
        loop {
            match packet::next(&mut read) {
                Ok(Some(Packet::Puback(id, reason))) => {
                    let Some(to) = shared.state().waiting.remove(&id) else {
                        break 'over "it acks what it was not sent".to_owned();
                    };
                    shared.1.add_permits(1);
                    // Nobody may wait for it any more.
                    let _ = to.send(reason);
                }
                Ok(Some(Packet::Pingresp)) => {}
                Ok(Some(Packet::Disconnect(reason))) => {
                    break 'over format!("the broker ended the connection: {reason}");
                }
                Ok(Some(_)) => break 'over "it sends what no publisher asks for".to_owned(),
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
                    break 'over format!("the broker has said nothing for {} s", (every * (unanswered + 1)).as_secs());
                }
                unanswered += 1;
                let mut ping = BytesMut::new();
                packet::pingreq(&mut ping);
                let _ = shared.state().outgoing.send(ping.freeze());
            }
        }
    };
    shared.end(&why);
}
