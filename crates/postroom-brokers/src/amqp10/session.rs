//! Receiving: a task of its own talks to the server. The server keeps what has no outcome, and hands it out again when the link has ended.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use postroom::{Answer, Arrival, Bound, Partition, Receipt, Received};
use tokio::io::AsyncReadExt;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::frame::{self, Flow, Frame, Layer, Transfer};
use super::message;
use super::peer::{self, INCOMING_WINDOW, Peer, Role, SILENT_MAX};
use super::subscription::Amqp10SubscriptionOptions;
use super::types::Field;
use crate::server_address::ServerAddress;
use crate::server_stream::{Stream, write};
use crate::sessions;

const HANDLE: u32 = 0;
/// Brokers have smaller limits.
const MESSAGE_BYTES_MAX: usize = 256 << 20;
/// Memory that a message takes besides its sections.
const AROUND: u64 = 512;

/// A session with a server.
pub(super) type Session = sessions::Session<Held>;

pub(super) struct Held {
    session: u64,
    origin: String,
    /// The server's handle of the link.
    handle: u32,
    prefetch: u32,
    bytes_max: u64,
    queue: VecDeque<Received>,
    /// By the number of the delivery; what the server calls it, and its bytes.
    open: HashMap<u64, Open>,
    bytes: u64,
    deliveries: u64,
    /// Of a message of which more is to come.
    partial: Option<(Transfer, BytesMut)>,
    /// Answers that were not sent, in the order in which they were given.
    answers: Vec<(u32, Answer)>,
    /// Frames with messages that may still come.
    window: u32,
    next_incoming_id: u32,
    /// Deliveries that have begun on the link, and up to how many were asked for.
    delivery_count: u32,
    delivery_limit: u32,
}

struct Open {
    delivery_id: u32,
    bytes: u64,
}

impl Held {
    fn has_room(&self) -> bool {
        self.bytes < self.bytes_max || self.open.is_empty() || self.partial.is_some()
    }

    fn takes_in(&mut self, mut transfer: Transfer) -> Result<bool, String> {
        if transfer.handle != self.handle {
            return Err("it sends a message on a link that is not there".to_owned());
        }
        if transfer.settled {
            return Err("it settles a message before it has arrived, and so could lose it".to_owned());
        }
        self.window = self.window.checked_sub(1).ok_or("it sends more frames than it may")?;
        self.next_incoming_id = self.next_incoming_id.wrapping_add(1);
        let (first, mut whole) = match self.partial.take() {
            Some((first, _)) if transfer.delivery_id.is_some() && transfer.delivery_id != first.delivery_id => {
                return Err("it begins a message before another is whole".to_owned());
            }
            Some((first, whole)) => (first, whole),
            None if self.credit() == 0 => return Err("it sends more messages than it was asked for".to_owned()),
            None => {
                self.delivery_count = self.delivery_count.wrapping_add(1);
                (transfer.clone(), BytesMut::new())
            }
        };
        if transfer.aborted {
            return Ok(false);
        }
        let payload = std::mem::take(&mut transfer.payload);
        if whole.len() + payload.len() > MESSAGE_BYTES_MAX {
            return Err(format!(
                "it sends a message of more than {MESSAGE_BYTES_MAX} bytes, which is not received: take it out of {} by other means",
                self.origin
            ));
        }
        if transfer.more {
            whole.extend_from_slice(&payload);
            self.partial = Some((Transfer { payload: Bytes::new(), ..first }, whole));
            return Ok(false);
        }
        let sections = if whole.is_empty() {
            payload
        } else {
            whole.extend_from_slice(&payload);
            whole.freeze()
        };
        let delivery_id = first.delivery_id.ok_or("it sends a message without a number")?;
        let came = message::received(&sections, &self.origin);
        if came.is_of_stream {
            return Err(peer::IS_COPIED.to_owned());
        }
        let bytes = sections.len() as u64 + AROUND;
        self.deliveries += 1;
        let receipt = Receipt::new(self.session, self.deliveries);
        self.open.insert(receipt.number(), Open { delivery_id, bytes });
        self.bytes = self.bytes.saturating_add(bytes);
        let message::Came { id, message, redelivered, .. } = came;
        self.queue.push_back(Received { receipt, partition: Partition::default(), redelivered, id, message });
        Ok(true)
    }

    /// Writes what the server has to hear: outcomes first, and then what it may send.
    fn writes(&mut self, into: &mut BytesMut) {
        let mut answers = std::mem::take(&mut self.answers).into_iter().peekable();
        while let Some((first, answer)) = answers.next() {
            let mut last = first;
            while let Some((next, _)) = answers.next_if(|(id, same)| *same == answer && *id == last.wrapping_add(1)) {
                last = next;
            }
            let refused =
                [Field::Composite(frame::ERROR, &[Field::Symbol(REFUSED), Field::Text("its receiver cannot take it")])];
            let outcome = match answer {
                Answer::Ack => Field::Composite(frame::ACCEPTED, &[]),
                Answer::Requeue => Field::Composite(frame::RELEASED, &[]),
                Answer::Reject => Field::Composite(frame::REJECTED, &refused),
            };
            let fields = [Field::Bool(true), Field::Uint(first), Field::Uint(last), Field::Bool(true), outcome];
            frame::put(into, Layer::Amqp, frame::DISPOSITION, &fields, b"");
        }
        let unsettled = self.open.len() as u32 + u32::from(self.partial.is_some());
        let room = if self.has_room() { self.prefetch.saturating_sub(unsettled) } else { 0 };
        let limit = self.delivery_count.wrapping_add(room);
        let (given, wanted) = (self.credit(), room);
        let asks = wanted > given && (given == 0 || wanted - given >= self.prefetch.div_ceil(4));
        if asks || self.window <= INCOMING_WINDOW / 2 {
            self.delivery_limit = if asks { limit } else { self.delivery_limit };
            self.window = INCOMING_WINDOW;
            self.flow(into);
        }
    }

    /// How many more deliveries may begin.
    fn credit(&self) -> u32 {
        let left = self.delivery_limit.wrapping_sub(self.delivery_count);
        if left > u32::MAX / 2 { 0 } else { left }
    }

    fn flow(&self, into: &mut BytesMut) {
        let fields = [
            Field::Uint(self.next_incoming_id),
            Field::Uint(self.window),
            Field::Uint(0),
            Field::Uint(u32::MAX),
            Field::Uint(HANDLE),
            Field::Uint(self.delivery_count),
            Field::Uint(self.credit()),
        ];
        frame::put(into, Layer::Amqp, frame::FLOW, &fields, b"");
    }
}

impl sessions::Held for Held {
    fn take(&mut self, max: Bound) -> Option<Arrival> {
        let (mut taken, mut bytes) = (Vec::new(), 0_usize);
        while let Some(next) = self.queue.front() {
            bytes = bytes.saturating_add(next.message.payload.len());
            if taken.len() >= max.messages.max(1) || (!taken.is_empty() && bytes > max.bytes) {
                break;
            }
            taken.extend(self.queue.pop_front());
        }
        (!taken.is_empty()).then_some(Arrival::Messages(taken))
    }

    /// Answers of other sessions, and second ones, settle nothing.
    fn settle(&mut self, answers: &[(Receipt, Answer)]) {
        for (receipt, answer) in answers.iter().filter(|(receipt, _)| receipt.session() == self.session) {
            let Some(open) = self.open.remove(&receipt.number()) else { continue };
            self.bytes = self.bytes.saturating_sub(open.bytes);
            self.answers.push((open.delivery_id, *answer));
        }
    }
}

/// Azure Service Bus keeps it with a dead letter.
const REFUSED: &str = "postroom:refused";

/// Connects, and attaches to the source.
pub(super) async fn begin(server: &ServerAddress, options: &Amqp10SubscriptionOptions) -> Result<Arc<Session>, String> {
    let mut peer = Peer::open(server, "postroom-receiver").await?;
    let attached = peer.attach(HANDLE, Role::Receives, Some(&options.address)).await?;
    let number = sessions::number();
    let held = Held {
        session: number,
        origin: options.address.clone(),
        handle: attached.handle,
        prefetch: options.prefetch.into(),
        bytes_max: options.unsettled_bytes_max,
        queue: VecDeque::new(),
        open: HashMap::new(),
        bytes: 0,
        deliveries: 0,
        partial: None,
        answers: Vec::new(),
        window: INCOMING_WINDOW,
        next_incoming_id: peer.next_incoming_id,
        delivery_count: attached.delivery_count,
        delivery_limit: attached.delivery_count,
    };
    let session = Arc::new(Session::new(number, held));
    let Peer { stream, read, heartbeat, .. } = peer;
    tokio::spawn(run(session.clone(), (stream, read), heartbeat));
    Ok(session)
}

async fn run(session: Arc<Session>, (mut stream, mut read): (Box<dyn Stream>, BytesMut), every: Duration) {
    let how = serve(&session, &mut stream, &mut read, every).await;
    session.ended(how);
}

/// Takes in what has come, as far as there is room for it. Returns whether there is room for more, and whether the receiver leaves.
fn hears(session: &Session, read: &mut BytesMut, to_write: &mut BytesMut) -> Result<(bool, bool), String> {
    let mut state = session.state();
    let held = &mut state.held;
    let mut came = false;
    while held.has_room()
        && let Some(found) = frame::next(read, Layer::Amqp)?
    {
        if let Some(why) = peer::ended(&found) {
            return Err(why);
        }
        match found {
            Frame::Transfer(transfer) => came |= held.takes_in(transfer)?,
            Frame::Flow(Flow { echo: true, .. }) => held.flow(to_write),
            _ => {}
        }
    }
    held.writes(to_write);
    if came {
        session.has_arrived();
    }
    Ok((held.has_room(), state.leaves))
}

async fn serve(
    session: &Session,
    stream: &mut Box<dyn Stream>,
    read: &mut BytesMut,
    every: Duration,
) -> Result<(), String> {
    let mut heartbeat = interval(every);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    heartbeat.tick().await;
    let mut heard = Instant::now();
    loop {
        let mut to_write = BytesMut::new();
        let (has_room, leaves) = hears(session, read, &mut to_write)?;
        if leaves {
            frame::put(&mut to_write, Layer::Amqp, frame::CLOSE, &[], b"");
            let written = write(stream, &to_write).await;
            // The end of its own side says that the server has given back what was not settled.
            let _ = timeout(SILENT_MAX, ended(stream, read)).await;
            return written;
        }
        write(stream, &to_write).await?;
        tokio::select! {
            // What has come is a sign of life, however late it is looked at.
            biased;
            came = stream.read_buf(read), if has_room => match came {
                Ok(0) => return Err("the server ended the connection".to_owned()),
                Ok(_) => heard = Instant::now(),
                Err(error) => return Err(error.to_string()),
            },
            () = session.told() => {}
            _ = heartbeat.tick() => {
                // While there is no room, nobody listens.
                if !has_room {
                    heard = Instant::now();
                }
                let silent = heard.elapsed();
                if silent > SILENT_MAX {
                    return Err(format!("the server has said nothing for {} s", silent.as_secs()));
                }
                let mut empty = BytesMut::new();
                frame::put_empty(&mut empty);
                write(stream, &empty).await?;
            }
        }
    }
}

/// Reads up to the end.
async fn ended(stream: &mut Box<dyn Stream>, read: &mut BytesMut) {
    loop {
        loop {
            match frame::next(read, Layer::Amqp) {
                Ok(Some(Frame::Close(_))) | Err(_) => return,
                Ok(Some(_)) => {}
                Ok(None) => break,
            }
        }
        if !matches!(stream.read_buf(read).await, Ok(1..)) {
            return;
        }
    }
}
