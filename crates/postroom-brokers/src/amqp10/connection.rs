//! One connection with one link that sends, which never comes back: what was handed to it and has no outcome is unknown, and is sent by
//! nobody later. (docs/decisions/0036 says why.)

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::frame::{self, Flow, Frame, Layer, Outcome};
use super::peer::{self, Attached, INCOMING_WINDOW, Peer, Role, SILENT_MAX};
use super::types::Field;
use crate::server_address::ServerAddress;
use crate::server_stream::WRITTEN_WITHIN;

const WRITTEN_AT_ONCE: usize = 64 << 10;
/// What a frame has around a part of a message at most.
const AROUND_PAYLOAD: usize = 64;
const HANDLE: u32 = 0;
/// So much may lie there before what only answers the server is added.
const OUT_BYTES_MAX: usize = 128 << 20;
/// The only format of messages that the standard has.
const MESSAGE_FORMAT: u32 = 0;

/// An open connection that publishes to one node. Dropping it ends it.
pub(super) struct Connection {
    shared: Arc<Shared>,
    /// Parts of two messages may not be mixed on a link.
    turn: tokio::sync::Mutex<()>,
    frame_bytes_max: usize,
    pub message_bytes_max: Option<u64>,
    tasks: [AbortHandle; 2],
}

struct Shared {
    state: Mutex<State>,
    /// There is something to write.
    to_write: Notify,
    /// The server takes more, or it is over.
    room: Notify,
}

/// In one lock, so that messages are sent in the order in which they got their numbers.
struct State {
    out: BytesMut,
    /// The server's handle of the link.
    handle: u32,
    next_outgoing_id: u32,
    /// Frames with messages that the session takes.
    window: u32,
    /// Deliveries of this link, sent or passed over, and how many more it takes.
    delivery_count: u32,
    credit: u32,
    /// The number of the next delivery.
    next_delivery: u32,
    waiting: HashMap<u32, oneshot::Sender<Outcome>>,
    next_incoming_id: u32,
    /// It ends by itself when all is written.
    leaves: bool,
    over: Option<String>,
}

impl State {
    fn flows(&mut self, flow: &Flow) {
        // Before its session has begun, a server knows no number of ours.
        let unseen = self.next_outgoing_id.wrapping_sub(flow.next_incoming_id.unwrap_or(0));
        self.window = flow.incoming_window.saturating_sub(unseen);
        let of_link = flow.link.filter(|link| link.handle == self.handle);
        if let Some(link) = of_link {
            let unseen = self.delivery_count.wrapping_sub(link.delivery_count);
            self.credit = link.credit.saturating_sub(unseen);
            if link.drain {
                // What it gives, and nobody needs now, is to be gone.
                self.delivery_count = self.delivery_count.wrapping_add(std::mem::take(&mut self.credit));
            }
        }
        if flow.echo || of_link.is_some_and(|link| link.drain) {
            self.tells_flow();
        }
    }

    fn tells_flow(&mut self) {
        if self.out.len() > OUT_BYTES_MAX {
            // It asks, and does not listen.
            return;
        }
        let fields = [
            Field::Uint(self.next_incoming_id),
            Field::Uint(INCOMING_WINDOW),
            Field::Uint(self.next_outgoing_id),
            Field::Uint(u32::MAX),
            Field::Uint(HANDLE),
            Field::Uint(self.delivery_count),
            Field::Uint(self.credit),
        ];
        frame::put(&mut self.out, Layer::Amqp, frame::FLOW, &fields, b"");
    }

    fn settles(&mut self, first: u32, last: u32, settled: bool, outcome: &Outcome) {
        if *outcome == Outcome::None && !settled {
            return;
        }
        if first == last {
            if let Some(to) = self.waiting.remove(&first) {
                // Nobody may wait for it any more.
                let _ = to.send(outcome.clone());
            }
        } else {
            let width = last.wrapping_sub(first);
            if width > u32::MAX / 2 {
                // Backwards.
                return;
            }
            for (_, to) in self.waiting.extract_if(|id, _| id.wrapping_sub(first) <= width) {
                let _ = to.send(outcome.clone());
            }
        }
        if !settled && self.out.len() <= OUT_BYTES_MAX {
            // It was asked to settle by itself; it waits for us, and keeps the delivery until then.
            let fields = [Field::Bool(false), Field::Uint(first), Field::Uint(last), Field::Bool(true)];
            frame::put(&mut self.out, Layer::Amqp, frame::DISPOSITION, &fields, b"");
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, why: &str) {
        let mut state = self.state();
        state.over.get_or_insert_with(|| why.to_owned());
        state.waiting.clear();
        if !state.leaves {
            // Nothing of it is sent any more.
            state.out.clear();
        }
        drop(state);
        self.room.notify_waiters();
        self.to_write.notify_one();
    }

    /// Waits until `take` has taken something; none: it is over.
    async fn room_for<T>(&self, mut take: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        loop {
            // From here on nothing is missed.
            let more = self.room.notified();
            {
                let mut state = self.state();
                if state.over.is_some() {
                    return None;
                }
                if let Some(taken) = take(&mut state) {
                    return Some(taken);
                }
            }
            more.await;
        }
    }
}

impl Connection {
    /// Connects to a node, or with an address in each message.
    pub async fn open(server: &ServerAddress, node: Option<&str>) -> Result<Self, String> {
        let mut peer = Peer::open(server, "postroom-relay").await?;
        let attached = peer.attach(HANDLE, Role::Sends, node).await?;
        let Attached { handle, delivery_count: _, message_bytes_max } = attached;
        let Peer { stream, read, came, frame_bytes_max, heartbeat, next_incoming_id, incoming_window } = peer;
        let mut state = State {
            out: BytesMut::new(),
            handle,
            next_outgoing_id: 0,
            window: incoming_window,
            delivery_count: 0,
            credit: 0,
            next_delivery: 0,
            waiting: HashMap::new(),
            next_incoming_id,
            leaves: false,
            over: None,
        };
        for frame in came {
            if let Frame::Flow(flow) = frame {
                state.flows(&flow);
            }
        }
        let shared = Arc::new(Shared { state: Mutex::new(state), to_write: Notify::new(), room: Notify::new() });
        let (from, into) = tokio::io::split(stream);
        let reader = tokio::spawn(reading((from, read), shared.clone(), heartbeat));
        let writer = tokio::spawn(writing(into, shared.clone(), reader.abort_handle()));
        Ok(Self {
            tasks: [reader.abort_handle(), writer.abort_handle()],
            shared,
            turn: tokio::sync::Mutex::new(()),
            frame_bytes_max,
            message_bytes_max,
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

    /// Waits until the server takes a message; false: it is over.
    pub async fn ready(&self) -> bool {
        self.shared.room_for(|state| (state.credit > 0 && state.window > 0).then_some(())).await.is_some()
    }

    /// Sends a message when the server takes one more. Returns what will be its outcome; none: the connection is over. A call that is
    /// dropped with a part of the message sent ends the connection.
    pub async fn publish(&self, mut sections: &[u8]) -> Option<oneshot::Receiver<Outcome>> {
        let _turn = self.turn.lock().await;
        // Dropped before the turn is somebody else's.
        let mut begun = Begun { connection: self, is_whole: true };
        let (to, outcome) = oneshot::channel();
        let mut to = Some(to);
        // Credit and a number first, and then as many frames as it needs.
        let id = self
            .shared
            .room_for(|state| {
                if state.window == 0 {
                    return None;
                }
                state.credit = state.credit.checked_sub(1)?;
                state.delivery_count = state.delivery_count.wrapping_add(1);
                let id = state.next_delivery;
                state.next_delivery = id.wrapping_add(1);
                state.waiting.insert(id, to.take()?);
                Some(id)
            })
            .await?;
        begun.is_whole = false;
        let tag = id.to_be_bytes();
        let part_bytes_max = self.frame_bytes_max - AROUND_PAYLOAD;
        loop {
            let (part, rest) = sections.split_at(sections.len().min(part_bytes_max));
            let more = !rest.is_empty();
            self.shared
                .room_for(|state| {
                    state.window = state.window.checked_sub(1)?;
                    state.next_outgoing_id = state.next_outgoing_id.wrapping_add(1);
                    let fields = [
                        Field::Uint(HANDLE),
                        Field::Uint(id),
                        Field::Binary(&tag),
                        Field::Uint(MESSAGE_FORMAT),
                        Field::Bool(false),
                        Field::Bool(more),
                    ];
                    frame::put(&mut state.out, Layer::Amqp, frame::TRANSFER, &fields, part);
                    Some(())
                })
                .await?;
            self.shared.to_write.notify_one();
            sections = rest;
            if !more {
                begun.is_whole = true;
                return Some(outcome);
            }
        }
    }

    /// Says farewell and ends it. What nobody waits for any more, and has no outcome, is not sent then.
    pub fn leave(&self) {
        let mut state = self.shared.state();
        if !state.waiting.is_empty() {
            drop(state);
            return self.kill("closed");
        }
        frame::put(&mut state.out, Layer::Amqp, frame::CLOSE, &[], b"");
        state.leaves = true;
        state.over.get_or_insert_with(|| "closed".to_owned());
        state.waiting.clear();
        drop(state);
        self.shared.room.notify_waiters();
        self.shared.to_write.notify_one();
    }
}

/// A message that is being sent.
struct Begun<'c> {
    connection: &'c Connection,
    is_whole: bool,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if !self.is_whole {
            // What comes next would be taken for the rest of it.
            self.connection.kill("a message was given up in its middle");
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let leaves = self.shared.state().leaves;
        if !leaves {
            self.kill("closed");
        }
    }
}

async fn writing(mut into: impl AsyncWrite + Unpin, shared: Arc<Shared>, reader: AbortHandle) {
    loop {
        let (bytes, ends) = {
            let mut state = shared.state();
            (state.out.split(), state.over.is_some())
        };
        for some in bytes.chunks(WRITTEN_AT_ONCE) {
            let problem = match timeout(WRITTEN_WITHIN, into.write_all(some)).await {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("the server has taken nothing for {} s", WRITTEN_WITHIN.as_secs()),
            };
            shared.end(&problem);
            return reader.abort();
        }
        match timeout(WRITTEN_WITHIN, into.flush()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => break shared.end(&error.to_string()),
            Err(late) => break shared.end(&late.to_string()),
        }
        if ends {
            break;
        }
        if bytes.is_empty() {
            shared.to_write.notified().await;
        }
    }
    let _ = timeout(WRITTEN_WITHIN, into.shutdown()).await;
    reader.abort();
}

async fn reading((mut from, mut read): (impl AsyncRead + Unpin, BytesMut), shared: Arc<Shared>, every: Duration) {
    let mut heartbeat = interval(every);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    heartbeat.tick().await;
    let mut heard = Instant::now();
    let why = 'over: loop {
        loop {
            let frame = match frame::next(&mut read, Layer::Amqp) {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(problem) => break 'over problem,
            };
            if let Some(why) = peer::ended(&frame) {
                break 'over why;
            }
            let mut state = shared.state();
            match frame {
                Frame::Flow(flow) => state.flows(&flow),
                Frame::Disposition { first, last, settled, outcome } => state.settles(first, last, settled, &outcome),
                Frame::Transfer(_) => break 'over "it sends messages to who only publishes".to_owned(),
                _ => {}
            }
            let writes = !state.out.is_empty();
            drop(state);
            shared.room.notify_waiters();
            if writes {
                shared.to_write.notify_one();
            }
        }
        tokio::select! {
            // What has come is a sign of life, however late it is looked at.
            biased;
            came = from.read_buf(&mut read) => match came {
                Ok(0) => break 'over "the server ended the connection".to_owned(),
                Ok(_) => heard = Instant::now(),
                Err(error) => break 'over error.to_string(),
            },
            _ = heartbeat.tick() => {
                let silent = heard.elapsed();
                if silent > SILENT_MAX {
                    break 'over format!("the server has said nothing for {} s", silent.as_secs());
                }
                frame::put_empty(&mut shared.state().out);
                shared.to_write.notify_one();
            }
        }
    };
    shared.end(&why);
}
