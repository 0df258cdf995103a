//! What an MQTT broker hands out, read without any of postroom's code: a session of a test's own, over the bare protocol.
//! <https://docs.oasis-open.org/mqtt/mqtt/v5.0/os/mqtt-v5.0-os.html>

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time::timeout;

const WITHIN: Duration = Duration::from_secs(60);
const END: &str = "audit/end";

/// A message as a subscriber gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heard {
    /// The message id; empty where it has none.
    pub id: String,
    /// Its topic.
    pub topic: String,
    /// Its user properties.
    pub properties: Vec<(String, String)>,
    /// Its payload.
    pub payload: Vec<u8>,
}

/// A session that the broker keeps for a test, from when it is made.
#[derive(Debug)]
pub struct AuditSession {
    address: String,
    client_id: String,
    filter: String,
    stream: Mutex<Option<TcpStream>>,
}

impl AuditSession {
    /// Subscribes to these topics at the broker at `HOST:PORT`.
    ///
    /// # Panics
    /// If the broker refuses.
    pub async fn begin(address: &str, client_id: &str, filter: &str) -> Self {
        let (address, client_id, filter) = (address.to_owned(), client_id.to_owned(), filter.to_owned());
        let session = Self { address, client_id, filter, stream: Mutex::new(None) };
        let opened = session.open().await;
        *session.stream.lock().await = Some(opened);
        session
    }

    async fn open(&self) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).await.expect("a connection");
        let mut body = string("MQTT");
        // MQTT 5, the session is kept, a minute, without expiry, and many at a time.
        body.extend([5, 0, 0, 60, 8, 0x11, 0xff, 0xff, 0xff, 0xff, 0x21, 0xff, 0xff]);
        body.extend(string(&self.client_id));
        write(&mut stream, 0x10, &body).await;
        let (kind, answer) = read(&mut stream).await;
        assert!(kind == 0x20 && answer[1] == 0, "{answer:?}");
        let mut body = vec![0, 1, 0];
        body.extend(string(&self.filter));
        body.push(1);
        write(&mut stream, 0x82, &body).await;
        stream
    }

    /// What has come since, in its order, if it subscribes to everything. Works after the broker was started again, if it kept the session.
    ///
    /// # Panics
    /// If the broker does not hand out what is there.
    pub async fn heard(&self) -> Vec<Heard> {
        let mut slot = self.stream.lock().await;
        let mut heard = Vec::new();
        if let Some(stream) = slot.as_mut()
            && timeout(WITHIN, hear(stream, &mut heard)).await.expect("an end").is_ok()
        {
            return heard;
        }
        let mut stream = self.open().await;
        timeout(WITHIN, hear(&mut stream, &mut heard)).await.expect("an end").expect("an open connection");
        *slot = Some(stream);
        heard
    }
}

/// Everything up to a message of our own, which comes behind all others.
async fn hear(stream: &mut TcpStream, heard: &mut Vec<Heard>) -> std::io::Result<()> {
    let mut end = string(END);
    end.push(0);
    stream.write_all(&framed(0x30, &end)).await?;
    loop {
        let (kind, body) = read_some(stream).await?;
        if kind & 0xf0 == 0xe0 {
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        if kind & 0xf0 != 0x30 {
            continue;
        }
        let mut at = 0;
        let topic = text(&body, &mut at);
        let acked = kind & 6 != 0;
        let id: Vec<u8> = if acked { body[at..at + 2].to_vec() } else { Vec::new() };
        at += id.len();
        let mut properties = Vec::new();
        let length = varint(&body, &mut at);
        let until = at + length;
        while at < until {
            at += 1;
            match body[at - 1] {
                0x26 => properties.push((text(&body, &mut at), text(&body, &mut at))),
                0x03 | 0x08 => drop(text(&body, &mut at)),
                0x01 => at += 1,
                0x02 => at += 4,
                0x0b => drop(varint(&body, &mut at)),
                other => panic!("a property {other}"),
            }
        }
        if topic == END {
            return Ok(());
        }
        let found = properties.iter().find(|(name, _)| name == "postroom-id").map(|(_, value)| value.clone());
        heard.push(Heard { id: found.unwrap_or_default(), topic, properties, payload: body[at..].to_vec() });
        if acked {
            stream.write_all(&framed(0x40, &id)).await?;
        }
    }
}

fn string(text: &str) -> Vec<u8> {
    let length = u16::try_from(text.len()).expect("a short text");
    [&length.to_be_bytes()[..], text.as_bytes()].concat()
}

fn framed(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut packet = vec![kind];
    let mut length = body.len();
    loop {
        let low = (length % 128) as u8;
        length /= 128;
        packet.push(if length > 0 { low | 0x80 } else { low });
        if length == 0 {
            break;
        }
    }
    packet.extend(body);
    packet
}

async fn write(stream: &mut TcpStream, kind: u8, body: &[u8]) {
    stream.write_all(&framed(kind, body)).await.expect("an open connection");
}

async fn read(stream: &mut TcpStream) -> (u8, Vec<u8>) {
    timeout(WITHIN, read_some(stream)).await.expect("a packet in time").expect("an open connection")
}

async fn read_some(stream: &mut TcpStream) -> std::io::Result<(u8, Vec<u8>)> {
    let kind = stream.read_u8().await?;
    let (mut length, mut shift) = (0_usize, 0);
    loop {
        let byte = stream.read_u8().await?;
        length |= usize::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            break;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    Ok((kind, body))
}

fn text(body: &[u8], at: &mut usize) -> String {
    let length = usize::from(u16::from_be_bytes([body[*at], body[*at + 1]]));
    let text = String::from_utf8_lossy(&body[*at + 2..*at + 2 + length]).into_owned();
    *at += 2 + length;
    text
}

fn varint(body: &[u8], at: &mut usize) -> usize {
    let (mut value, mut shift) = (0, 0);
    loop {
        let byte = body[*at];
        *at += 1;
        value |= usize::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            return value;
        }
    }
}
