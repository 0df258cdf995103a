//! A connection before it is shared out to tasks: the login, one session, and links.
//! <https://docs.oasis-open.org/amqp/core/v1.0/os/amqp-core-security-v1.0-os.html>

use std::collections::VecDeque;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use postroom::MessageId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::address;
use super::frame::{self, Fault, Frame, Layer, Product};
use super::types::Field;
use crate::server_address::ServerAddress;
use crate::server_stream::{self, CONNECT_WITHIN, Stream};

const SASL_HEADER: [u8; 8] = *b"AMQP\x03\x01\x00\x00";
const HEADER: [u8; 8] = *b"AMQP\x00\x01\x00\x00";

/// A server that has sent nothing for so long is gone. It is told half of it, as the protocol advises.
pub(super) const SILENT_MAX: Duration = Duration::from_secs(14);
/// How often the server hears something, unless it asks for more.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// However often it asks for.
const HEARTBEAT_MIN: Duration = Duration::from_millis(100);
/// Frames with messages that the server may send before it hears that there is room for more.
pub(super) const INCOMING_WINDOW: u32 = 2048;
const HANDLE_MAX: u32 = 7;
/// What may become of a message. Not that it is to be modified: it would be less than the reason why it is rejected.
const OUTCOMES: [&str; 3] = ["amqp:accepted:list", "amqp:rejected:list", "amqp:released:list"];

/// A session of a connection, without a link or with some.
pub(super) struct Peer {
    pub stream: Box<dyn Stream>,
    pub read: BytesMut,
    /// Came while something else was waited for.
    pub came: VecDeque<Frame>,
    pub frame_bytes_max: usize,
    pub heartbeat: Duration,
    /// The number of the server's next frame with a message.
    pub next_incoming_id: u32,
    /// Frames with messages that it takes.
    pub incoming_window: u32,
}

/// One end of a link that stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attached {
    pub handle: u32,
    pub delivery_count: u32,
    /// None: the server names no limit.
    pub message_bytes_max: Option<u64>,
}

/// What a link is for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Role {
    Sends,
    Receives,
}

impl Peer {
    /// Connects, says who it is, and begins a session.
    pub async fn open(server: &ServerAddress, name: &str) -> Result<Self, String> {
        let opening = async {
            let stream = server_stream::connected(server).await?;
            let mut peer = Self {
                stream,
                read: BytesMut::new(),
                came: VecDeque::new(),
                frame_bytes_max: frame::FRAME_BYTES_MIN as usize,
                heartbeat: HEARTBEAT,
                next_incoming_id: 0,
                incoming_window: 0,
            };
            peer.log_in(server).await?;
            peer.begin(server, name).await?;
            Ok(peer)
        };
        server_stream::opened(server, opening).await
    }

    async fn log_in(&mut self, server: &ServerAddress) -> Result<(), String> {
        self.agree(SASL_HEADER).await?;
        let Frame::Mechanisms(offered) = self.next(Layer::Sasl).await? else {
            return Err("the server's first frame offers no login".to_owned());
        };
        let has = |name: &str| offered.iter().any(|offered| offered == name);
        let plain = format!("\0{}\0{}", server.user, server.password);
        let (mechanism, proof) = match () {
            () if !server.user.is_empty() && has("PLAIN") => ("PLAIN", plain.as_bytes()),
            () if !server.user.is_empty() => {
                let offered = offered.join(", ");
                return Err(format!("{LOGIN}by user and password is not offered, only {offered}"));
            }
            () if server.files.has_certificate() && has("EXTERNAL") => ("EXTERNAL", &b""[..]),
            () if has("ANONYMOUS") => ("ANONYMOUS", &b"postroom"[..]),
            () => {
                let offered = offered.join(", ");
                return Err(format!(
                    "{LOGIN}is missing in the URL: write USER:PASSWORD@ before the host (the server offers {offered})"
                ));
            }
        };
        let hostname = address::hostname(server);
        let fields = [Field::Symbol(mechanism), Field::Binary(proof), Field::Text(&hostname)];
        self.say(Layer::Sasl, frame::INIT, &fields).await?;
        match self.next(Layer::Sasl).await? {
            Frame::LoginOutcome(0) => self.agree(HEADER).await,
            Frame::LoginOutcome(1) => Err(format!("{LOGIN}({mechanism}) is refused: wrong user or password")),
            Frame::LoginOutcome(code) => {
                Err(format!("{LOGIN}({mechanism}) cannot be checked by the server, which says code {code}"))
            }
            _ => Err(format!("{LOGIN}({mechanism}) is not enough for the server, which asks for more")),
        }
    }

    async fn begin(&mut self, server: &ServerAddress, name: &str) -> Result<(), String> {
        let container = format!("{name}-{}", MessageId::new().as_uuid().simple());
        let hostname = address::hostname(server);
        let silent = SILENT_MAX.as_millis() as u32 / 2;
        let open = [
            Field::Text(&container),
            Field::Text(&hostname),
            Field::Uint(frame::FRAME_BYTES_MAX),
            Field::Ushort(0),
            Field::Uint(silent),
        ];
        self.say(Layer::Amqp, frame::OPEN, &open).await?;
        // RabbitMQ gives no reason.
        let broken = |problem| {
            let place =
                if server.path.is_empty() { "the default virtual host".to_owned() } else { format!("{hostname:?}") };
            format!(
                "{problem}, when the connection to {place} was to be opened: does that exist, and may this user use it? The server's log says why"
            )
        };
        match self.next(Layer::Amqp).await.map_err(broken)? {
            Frame::Open { frame_bytes_max, idle_ms, product } => {
                refuse_unreliable(&product)?;
                let most = frame_bytes_max.min(frame::FRAME_BYTES_MAX);
                self.frame_bytes_max = most.max(frame::FRAME_BYTES_MIN) as usize;
                if idle_ms > 0 {
                    self.heartbeat = HEARTBEAT.min(Duration::from_millis(u64::from(idle_ms)) / 2).max(HEARTBEAT_MIN);
                }
            }
            other => return Err(ended(&other).unwrap_or_else(|| "the server did not open the connection".to_owned())),
        }
        let window = Field::Uint(INCOMING_WINDOW);
        let begin = [Field::Null, Field::Uint(0), window, Field::Uint(u32::MAX), Field::Uint(HANDLE_MAX)];
        self.say(Layer::Amqp, frame::BEGIN, &begin).await?;
        loop {
            match self.next(Layer::Amqp).await? {
                Frame::Begin { next_outgoing_id, incoming_window } => {
                    (self.next_incoming_id, self.incoming_window) = (next_outgoing_id, incoming_window);
                    return Ok(());
                }
                Frame::Close(fault) => return Err(ended(&Frame::Close(fault)).unwrap_or_default()),
                _ => {}
            }
        }
    }

    /// Attaches a link to a node at the server, in ten seconds; none: each message says where it goes.
    pub async fn attach(&mut self, handle: u32, role: Role, node: Option<&str>) -> Result<Attached, String> {
        let attaching = self.attaching(handle, role, node);
        let late = || Err(format!("{}: no answer within {} s", shown(node), CONNECT_WITHIN.as_secs()));
        timeout(CONNECT_WITHIN, attaching).await.unwrap_or_else(|_| late())
    }

    async fn attaching(&mut self, handle: u32, role: Role, node: Option<&str>) -> Result<Attached, String> {
        let name = format!("postroom-{}", MessageId::new().as_uuid().simple());
        let receives = matches!(role, Role::Receives);
        let none = Field::Null;
        let (there, nobody) = (node.map_or(none, Field::Text), none);
        // Without a list of outcomes, a receiver could only say that it has accepted a message.
        let of = |address| [address, none, none, none, none, none, none, none, none, Field::Symbols(&OUTCOMES)];
        let (source, target) = if receives { (of(there), nobody) } else { (of(nobody), there) };
        let attach = [
            Field::Text(&name),
            Field::Uint(handle),
            Field::Bool(receives),
            // Nothing is settled before its receiver has said what became of it, and then it is.
            Field::Ubyte(0),
            Field::Ubyte(0),
            Field::Composite(frame::SOURCE, &source),
            Field::Composite(frame::TARGET, &[target]),
            Field::Null,
            Field::Null,
            if receives { Field::Null } else { Field::Uint(0) },
        ];
        self.say(Layer::Amqp, frame::ATTACH, &attach).await?;
        let mut attached = None;
        loop {
            match self.next(Layer::Amqp).await? {
                Frame::Attach { sends_settled: true, .. } => {
                    return Err(format!(
                        "{}: the server settles messages before they have arrived, and so would lose them",
                        shown(node)
                    ));
                }
                Frame::Attach { sends_copies: true, .. } => return Err(format!("{}: {IS_COPIED}", shown(node))),
                Frame::Attach { handle: theirs, refused, delivery_count, message_bytes_max, .. } => {
                    attached = Some(Attached { handle: theirs, delivery_count, message_bytes_max });
                    if !refused {
                        return attached.ok_or_else(String::new);
                    }
                }
                Frame::Detach(theirs, fault) if attached.is_some_and(|attached| attached.handle == theirs) => {
                    return Err(format!("{}: {}", shown(node), told(fault.as_ref(), "the server refuses the link")));
                }
                other => match ended(&other) {
                    Some(why) => return Err(format!("{}: {why}", shown(node))),
                    None => self.came.push_back(other),
                },
            }
        }
    }

    async fn say(&mut self, layer: Layer, descriptor: u64, fields: &[Field<'_>]) -> Result<(), String> {
        let mut bytes = BytesMut::new();
        frame::put(&mut bytes, layer, descriptor, fields, b"");
        self.stream.write_all(&bytes).await.map_err(|error| error.to_string())?;
        self.stream.flush().await.map_err(|error| error.to_string())
    }

    /// Says which protocol follows, and hears that the server has it.
    async fn agree(&mut self, header: [u8; 8]) -> Result<(), String> {
        self.stream.write_all(&header).await.map_err(|error| error.to_string())?;
        self.stream.flush().await.map_err(|error| error.to_string())?;
        while self.read.len() < header.len() {
            self.hear().await?;
        }
        match self.read.first_chunk() == Some(&header) {
            true => {
                self.read.advance(header.len());
                Ok(())
            }
            false => {
                Err("the server does not speak AMQP 1.0 with a login on this port; RabbitMQ does from version 4.0"
                    .to_owned())
            }
        }
    }

    async fn next(&mut self, layer: Layer) -> Result<Frame, String> {
        loop {
            match frame::next(&mut self.read, layer)? {
                Some(Frame::Empty | Frame::Other) => {}
                Some(frame) => return Ok(frame),
                None => self.hear().await?,
            }
        }
    }

    async fn hear(&mut self) -> Result<(), String> {
        match self.stream.read_buf(&mut self.read).await {
            Ok(0) => Err("the server ended the connection".to_owned()),
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Says farewell, without waiting for an answer.
    pub async fn leave(mut self) {
        let farewell = async {
            let _ = self.say(Layer::Amqp, frame::CLOSE, &[]).await;
            let _ = self.stream.shutdown().await;
        };
        let _ = timeout(CONNECT_WITHIN, farewell).await;
    }
}

/// RabbitMQ's plugin before 4.0 answers *accepted* for a message that no queue takes.
fn refuse_unreliable(product: &Product) -> Result<(), String> {
    let version = product.version.as_deref().unwrap_or_default();
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    match (product.name.as_deref(), major) {
        (Some("RabbitMQ"), Some(0..4)) => Err(format!(
            "RabbitMQ {version} accepts messages over AMQP 1.0 that no queue takes, and loses them: use kind = \"rabbitmq\", or version 4.0 or later"
        )),
        _ => Ok(()),
    }
}

/// Nothing is kept for a receiver there.
pub(super) const IS_COPIED: &str = "it is a stream or a topic, which hands out copies of what comes while somebody receives, and so loses the rest: name a queue";

/// What `check` knows a problem with it by.
pub(super) const LOGIN: &str = "the login ";

fn shown(node: Option<&str>) -> &str {
    node.unwrap_or("an address in each message (does the broker have the anonymous terminus?)")
}

/// Why it is over with a connection, if a frame says so.
pub(super) fn ended(frame: &Frame) -> Option<String> {
    let (what, fault) = match frame {
        Frame::Detach(_, fault) => ("the server ended the link", fault),
        Frame::End(fault) => ("the server ended the session", fault),
        Frame::Close(fault) => ("the server ended the connection", fault),
        _ => return None,
    };
    Some(told(fault.as_ref(), what))
}

fn told(fault: Option<&Fault>, what: &str) -> String {
    match fault {
        Some(fault) => format!("{what}: {fault}"),
        None => what.to_owned(),
    }
}
