//! Receiving: a task of its own talks to the broker. The broker keeps what is not acked, and hands it out again in the next session of the
//! same client id. Acks go in the order of the messages, as the protocol demands, so one goes out when all before it are settled.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use postroom::{Answer, Arrival, Bound, Receipt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::connection::{HEARTBEATS_UNANSWERED_MAX, KEEP_ALIVE_SECONDS, heartbeat, opened};
use super::message;
use super::packet::{self, Connect, Packet, Publish};
use super::subscription::MqttSubscriptionOptions;
use crate::deliveries::{Deliveries, Taken};
use crate::server_address::ServerAddress;
use crate::server_stream::{CONNECT_WITHIN, Stream, WRITTEN_WITHIN, write};
use crate::sessions;

const SUBSCRIBES: u16 = 1;

/// A session with a broker.
pub(super) type Session = sessions::Session<Held>;

pub(super) struct Held {
    deliveries: Deliveries<u64>,
    /// What the deliveries are called there.
    part: u32,
    /// Those that are not acked, in their order, each with its packet id.
    unacked: VecDeque<(u64, u16)>,
    next: u64,
}

impl Held {
    fn has_room(&self) -> bool {
        self.deliveries.room() > 0
    }

    fn take_in(&mut self, publication: Publish) {
        let (place, redelivered) = (self.next, publication.duplicate);
        self.next += 1;
        self.unacked.extend(publication.packet_id.map(|id| (place, id)));
        let (id, message) = message::received(publication);
        self.deliveries.arrived(Taken { partition: self.part, place, next: place + 1, redelivered, id, message });
    }

    /// Writes the acks of what nothing open comes before.
    fn acks(&mut self, into: &mut BytesMut) {
        let Some((floor, _)) = self.deliveries.to_commit(self.part, false) else { return };
        while let Some(&(place, id)) = self.unacked.front()
            && place < floor
        {
            packet::puback(into, id);
            self.unacked.pop_front();
        }
        self.deliveries.committed(self.part, floor, None);
    }
}

impl sessions::Held for Held {
    fn take(&mut self, max: Bound) -> Option<Arrival> {
        self.deliveries.take(max)
    }

    fn settle(&mut self, answers: &[(Receipt, Answer)]) {
        self.deliveries.settle(answers);
    }
}

/// Connects and subscribes. `knew`: this client id had a session, as far as this process knows.
pub(super) async fn begin(
    address: &ServerAddress,
    options: &MqttSubscriptionOptions,
    knew: bool,
) -> Result<Arc<Session>, String> {
    let connect = Connect {
        client_id: &options.client_id,
        clean_start: false,
        keep_alive_seconds: KEEP_ALIVE_SECONDS,
        session_expiry_seconds: options.session_expiry_seconds(),
        receive_maximum: options.prefetch,
        user: &address.user,
        password: &address.password,
    };
    let (mut stream, mut read, connack) = opened(address, &connect).await?;
    match (connack.session_present, knew) {
        (true, _) => {}
        (false, true) => tracing::error!(
            client_id = options.client_id,
            "the broker has forgotten this session: what it had for it, and what came meanwhile, is lost"
        ),
        (false, false) => tracing::warn!(
            client_id = options.client_id,
            "this is a new session at the broker: what was published before it is not received"
        ),
    }
    if connack.session_expiry_seconds.is_some_and(|granted| granted < connect.session_expiry_seconds) {
        tracing::error!(
            client_id = options.client_id,
            seconds = connack.session_expiry_seconds,
            "the broker keeps this session for a shorter time than asked for: what comes later, while nobody receives, is lost"
        );
    }
    let mut request = BytesMut::new();
    packet::subscribe(&mut request, SUBSCRIBES, options.topics.iter().map(String::as_str));
    stream.write_all(&request).await.map_err(|error| error.to_string())?;
    let number = sessions::number();
    let mut deliveries = Deliveries::new(number, options.prefetch, options.unsettled_bytes_max);
    let part = deliveries.begin(0, u64::MAX);
    let mut held = Held { deliveries, part, unacked: VecDeque::new(), next: 0 };
    // Messages of an earlier session may come before the answer.
    let subscribed = async {
        loop {
            match packet::next(&mut read)? {
                Some(Packet::Suback(_, codes)) => return granted(&options.topics, &codes),
                Some(Packet::Publish(publication)) => held.take_in(publication),
                Some(Packet::Disconnect(reason)) => {
                    return Err(format!("the broker ended the connection: {reason}"));
                }
                Some(_) => {}
                None if stream.read_buf(&mut read).await.map_err(|error| error.to_string())? == 0 => {
                    return Err("the broker ended the connection when it was to subscribe".to_owned());
                }
                None => {}
            }
        }
    };
    let subscribed = timeout(CONNECT_WITHIN, subscribed).await;
    subscribed.map_err(|_| format!("the broker did not subscribe within {} s", CONNECT_WITHIN.as_secs()))??;
    let session = Arc::new(Session::new(number, held));
    tokio::spawn(run(session.clone(), (stream, read), heartbeat(&connack)));
    Ok(session)
}

async fn run(session: Arc<Session>, (mut stream, mut read): (Box<dyn Stream>, BytesMut), every: Duration) {
    let how = serve(&session, &mut stream, &mut read, every).await;
    session.ended(how);
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
        let (has_room, leaves) = {
            let mut state = session.state();
            let held = &mut state.held;
            let mut came = false;
            while held.has_room()
                && let Some(found) = packet::next(read)?
            {
                match found {
                    Packet::Publish(publication) => {
                        held.take_in(publication);
                        came = true;
                    }
                    Packet::Disconnect(reason) => return Err(format!("the broker ended the connection: {reason}")),
                    Packet::Connack(_) => return Err("it answers what it was not asked".to_owned()),
                    Packet::Puback(..) | Packet::Suback(..) | Packet::Pingresp => {}
                }
            }
            held.acks(&mut to_write);
            if came {
                session.has_arrived();
            }
            (held.has_room(), state.leaves)
        };
        if leaves {
            packet::disconnect(&mut to_write);
            let written = timeout(WRITTEN_WITHIN, stream.write_all(&to_write)).await;
            let _ = timeout(WRITTEN_WITHIN, stream.shutdown()).await;
            return written.map_err(|late| late.to_string())?.map_err(|error| error.to_string());
        }
        write(stream, &to_write).await?;
        tokio::select! {
            came = stream.read_buf(read), if has_room => match came {
                Ok(0) => return Err("the broker ended the connection (does somebody else use this client_id?)".to_owned()),
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
                if silent > every * (HEARTBEATS_UNANSWERED_MAX + 1) {
                    return Err(format!("the broker has said nothing for {} s", silent.as_secs()));
                }
                let mut ping = BytesMut::new();
                packet::pingreq(&mut ping);
                write(stream, &ping).await?;
            }
        }
    }
}

/// Whether each filter was granted with acks.
fn granted(filters: &[String], codes: &[u8]) -> Result<(), String> {
    if codes.len() != filters.len() {
        return Err("the broker did not answer for each topic filter".to_owned());
    }
    let refused = filters.iter().zip(codes).find(|(_, code)| **code != 1 && **code != 2);
    match refused {
        None => Ok(()),
        Some((filter, 0)) => {
            Err(format!("the broker grants {filter:?} only without acks (QoS 0): messages would be lost"))
        }
        Some((filter, code)) => {
            let reason = packet::Reason { code: *code, text: None };
            Err(format!("the broker does not let this user subscribe to {filter:?}: {reason}"))
        }
    }
}
