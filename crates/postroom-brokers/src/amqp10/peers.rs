//! Servers that behave as no real one does when it is asked to, written for these tests.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use postroom::{Arrival, Batch, Bound, FailureKind, Message, Sink, Subscription, UNREADABLE_HEADER, Verdict, Verdicts};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::connection::Connection;
use super::frame::{self, Frame, Layer, Outcome};
use super::types::Field;
use super::{Amqp10Options, Amqp10Sink, Amqp10Subscription, Amqp10SubscriptionOptions};

const RECEIVER: Field<'_> = Field::Bool(true);
const MECHANISMS: u64 = 0x40;
const OUTCOME: u64 = 0x44;
const DETACH: u64 = 0x16;
const MODIFIED: u64 = 0x27;
const SECONDS: Duration = Duration::from_secs(20);

/// The server's end of a connection.
struct Server {
    stream: TcpStream,
    read: BytesMut,
}

impl Server {
    async fn say(&mut self, descriptor: u64, fields: &[Field<'_>], payload: &[u8]) {
        let layer = if descriptor >= MECHANISMS { Layer::Sasl } else { Layer::Amqp };
        let mut bytes = BytesMut::new();
        frame::put(&mut bytes, layer, descriptor, fields, payload);
        // Who is refused does not read on.
        let _ = self.stream.write_all(&bytes).await;
    }

    /// The next frame that the client sends, but for heartbeats; none: it is gone.
    async fn hear(&mut self) -> Option<Frame> {
        loop {
            match frame::next(&mut self.read, Layer::Amqp).unwrap() {
                Some(Frame::Empty) => {}
                Some(frame) => return Some(frame),
                None if self.stream.read_buf(&mut self.read).await.unwrap_or(0) == 0 => return None,
                None => {}
            }
        }
    }

    /// Takes a connection, a session and one link.
    async fn accept(listener: &TcpListener, product: (&str, &str)) -> Self {
        let (stream, _) = listener.accept().await.unwrap();
        let mut server = Self { stream, read: BytesMut::new() };
        let mut header = [0; 8];
        server.stream.read_exact(&mut header).await.unwrap();
        server.stream.write_all(&header).await.unwrap();
        server.say(MECHANISMS, &[Field::Symbol("ANONYMOUS")], b"").await;
        let mut size = [0; 4];
        server.stream.read_exact(&mut size).await.unwrap();
        let mut init = vec![0; u32::from_be_bytes(size) as usize - 4];
        server.stream.read_exact(&mut init).await.unwrap();
        server.say(OUTCOME, &[Field::Ubyte(0)], b"").await;
        server.stream.read_exact(&mut header).await.unwrap();
        server.stream.write_all(&header).await.unwrap();
        assert!(matches!(server.hear().await, Some(Frame::Open { .. })));
        let of =
            [(Field::Symbol("product"), Field::Text(product.0)), (Field::Symbol("version"), Field::Text(product.1))];
        let none = Field::Null;
        // Small frames, so that messages have several.
        let open = [Field::Text("s"), none, Field::Uint(512), none, none, none, none, none, none, Field::Map(&of)];
        server.say(frame::OPEN, &open, b"").await;
        server
    }

    async fn attach(&mut self, sends: bool) {
        assert!(matches!(self.hear().await, Some(Frame::Begin { .. })));
        let begin = [Field::Ushort(0), Field::Uint(7), Field::Uint(4), Field::Uint(100)];
        self.say(frame::BEGIN, &begin, b"").await;
        assert!(matches!(self.hear().await, Some(Frame::Attach { .. })));
        let end = |code| Field::Composite(code, &[]);
        let (source, target) = (end(frame::SOURCE), end(frame::TARGET));
        let role = if sends { Field::Bool(false) } else { RECEIVER };
        let none = Field::Null;
        let attach = [Field::Text("l"), Field::Uint(3), role, none, none, source, target, none, none, Field::Uint(0)];
        self.say(frame::ATTACH, &attach, b"").await;
    }

    /// So many more messages and frames, behind so many.
    async fn credit(&mut self, (messages, frames): (u32, u32), (count, from): (u32, u32)) {
        let fields = [
            Field::Uint(from),
            Field::Uint(frames),
            Field::Uint(7),
            Field::Uint(100),
            Field::Uint(3),
            Field::Uint(count),
            Field::Uint(messages),
        ];
        self.say(frame::FLOW, &fields, b"").await;
    }

    async fn settle(&mut self, (first, last): (u32, u32), settled: bool, outcome: Field<'_>) {
        let fields = [RECEIVER, Field::Uint(first), Field::Uint(last), Field::Bool(settled), outcome];
        self.say(frame::DISPOSITION, &fields, b"").await;
    }

    /// Frames with messages up to so many messages.
    async fn transfers(&mut self, messages: usize) -> usize {
        let (mut whole, mut frames) = (0, 0);
        while whole < messages {
            if let Some(Frame::Transfer(transfer)) = self.hear().await {
                frames += 1;
                whole += usize::from(!transfer.more);
            }
        }
        frames
    }
}

async fn listening() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("amqp://{}", listener.local_addr().unwrap());
    (listener, url)
}

fn sink(url: &str) -> Arc<Amqp10Sink> {
    let options = Amqp10Options { publish_deadline_seconds: 2, ..Amqp10Options::new(url, "q") };
    Arc::new(Amqp10Sink::new(options).unwrap())
}

fn batch(messages: usize, payload: &str) -> Batch {
    Batch::new((0..messages).map(|_| Message::new("orders", "k", payload.to_owned())))
}

fn kinds(mut verdicts: Verdicts, messages: usize) -> Vec<Option<FailureKind>> {
    let kind = |verdict| match verdict {
        Verdict::Stored => None,
        Verdict::Failed(failure) => Some(failure.kind),
        other => panic!("{other:?}"),
    };
    (0..messages).map(|place| kind(verdicts.take(place))).collect()
}

const ACCEPTED: Field<'_> = Field::Composite(frame::ACCEPTED, &[]);

#[tokio::test]
async fn each_message_has_the_outcome_that_was_said_of_it_however_it_is_said() {
    let (listener, url) = listening().await;
    let sink = sink(&url);
    let publishing = tokio::spawn({
        let sink = sink.clone();
        async move { sink.publish(&batch(6, &"x".repeat(2000))).await }
    });
    let mut server = Server::accept(&listener, ("other", "1")).await;
    server.attach(false).await;
    // Frames come in fours, and messages have more.
    server.credit((2, 4), (0, 0)).await;
    let (mut frames, mut whole) = (0, 0);
    while whole < 6 {
        let Some(Frame::Transfer(transfer)) = server.hear().await else { panic!("a part of a message") };
        frames += 1;
        whole += usize::from(!transfer.more);
        if frames % 4 == 0 {
            server.credit((6, 4), (0, frames)).await;
        }
    }
    assert!(frames > 12, "messages have several frames");
    let fault = Field::Composite(frame::ERROR, &[Field::Symbol("com.microsoft:server-busy")]);
    let bad = Field::Composite(frame::ERROR, &[Field::Symbol("amqp:decode-error"), Field::Text("no")]);
    server.settle((5, 5), true, Field::Composite(frame::REJECTED, &[fault])).await;
    // A range, not settled by itself: the client settles.
    server.settle((0, 1), false, ACCEPTED).await;
    server.settle((2, 2), true, Field::Composite(frame::REJECTED, &[bad])).await;
    server.settle((3, 3), true, Field::Composite(MODIFIED, &[Field::Bool(true), Field::Bool(true)])).await;
    server.settle((4, 4), true, Field::Composite(frame::RELEASED, &[])).await;
    let (busy, transient) = (Some(FailureKind::Busy), Some(FailureKind::Transient));
    let verdicts = tokio::time::timeout(SECONDS, publishing).await.unwrap().unwrap().unwrap();
    assert_eq!(kinds(verdicts, 6), [None, None, Some(FailureKind::Permanent), transient, transient, busy]);
}

/// The second one is asked first, when the server takes one frame more.
#[tokio::test]
async fn parts_of_two_messages_are_not_mixed() {
    let (listener, url) = listening().await;
    let address = super::address::parse(&url).unwrap();
    let (connection, mut server) = tokio::join!(Connection::open(&address, Some("q")), async {
        let mut server = Server::accept(&listener, ("other", "1")).await;
        server.attach(false).await;
        server.credit((2, 1), (0, 0)).await;
        server
    });
    let connection = connection.unwrap();
    let sections = [0; 2_000];
    let (mut first, mut second) = (Box::pin(connection.publish(&sections)), Box::pin(connection.publish(&sections)));
    let (mut whole, mut frames, mut open) = (0, 0, None);
    let mut outcomes = Vec::new();
    while whole < 2 {
        // As far as they come with one frame.
        assert!(connection.ready().await);
        if outcomes.is_empty() && frames > 0 {
            tokio::select! {
                biased;
                _ = &mut second => panic!("it is whole before the first"),
                () = std::future::ready(()) => {}
            }
        }
        let next = if outcomes.is_empty() { &mut first } else { &mut second };
        tokio::select! {
            biased;
            outcome = next => outcomes.push(outcome.unwrap()),
            () = std::future::ready(()) => {}
        }
        let Some(Frame::Transfer(transfer)) = server.hear().await else { panic!("a part of a message") };
        assert!(open.is_none() || open == transfer.delivery_id, "another message is not whole");
        open = transfer.delivery_id.filter(|_| transfer.more);
        frames += 1;
        whole += u32::from(!transfer.more);
        server.credit((3, 1), (whole, frames)).await;
    }
    server.settle((0, 1), true, ACCEPTED).await;
    for outcome in outcomes {
        assert_eq!(outcome.await, Ok(Outcome::Accepted));
    }
}

#[tokio::test]
async fn what_was_not_answered_when_a_link_ends_is_unknown_and_what_a_server_does_not_take_is_not_lost() {
    let (listener, url) = listening().await;
    let sink = sink(&url);
    let publish = |messages| {
        let sink = sink.clone();
        tokio::spawn(async move { sink.publish(&batch(messages, "x")).await })
    };
    let publishing = publish(3);
    let mut server = Server::accept(&listener, ("other", "1")).await;
    server.attach(false).await;
    server.credit((10, 100), (0, 0)).await;
    assert_eq!(server.transfers(3).await, 3);
    server.settle((0, 0), true, ACCEPTED).await;
    // No outcome at all is none, and one for what was never sent is for nobody.
    server.settle((1, 1), true, Field::Null).await;
    server.settle((900, 1000), true, ACCEPTED).await;
    let fault = Field::Composite(frame::ERROR, &[Field::Symbol("amqp:resource-deleted")]);
    server.say(DETACH, &[Field::Uint(3), Field::Bool(true), fault], b"").await;
    let mut verdicts = publishing.await.unwrap().unwrap();
    assert_eq!(verdicts.take(0), Verdict::Stored);
    for place in 1..3 {
        assert!(matches!(verdicts.take(place), Verdict::Unknown(_)));
    }
    assert!(sink.disconnected().unwrap().contains("amqp:resource-deleted"));
    // One that gives no credit.
    let publishing = publish(3);
    let mut server = Server::accept(&listener, ("other", "1")).await;
    server.attach(false).await;
    let error = publishing.await.unwrap().unwrap_err();
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert!(why.contains("no credit"), "{why}");
    // Two of three: the third may be sent by nobody later. The window is as large as a number can be.
    let publishing = publish(3);
    server.credit((2, u32::MAX), (0, 0)).await;
    assert_eq!(server.transfers(2).await, 2);
    server.settle((0, 1), true, ACCEPTED).await;
    let mut verdicts = publishing.await.unwrap().unwrap();
    assert_eq!((verdicts.take(0), verdicts.take(1)), (Verdict::Stored, Verdict::Stored));
    assert_eq!(verdicts.take(2), Verdict::NotSent);
    // The connection is as good as it was.
    let publishing = publish(1);
    server.credit((9, 1), (2, 2)).await;
    assert_eq!(server.transfers(1).await, 1);
    server.settle((2, 2), true, ACCEPTED).await;
    assert_eq!(publishing.await.unwrap().unwrap().take(0), Verdict::Stored);
    // One that is given up in the middle of a message ends it: the next one would be taken for the rest.
    let publishing = {
        let sink = sink.clone();
        tokio::spawn(async move { sink.publish(&batch(1, &"x".repeat(3000))).await })
    };
    server.credit((9, 2), (3, 3)).await;
    assert!(matches!(server.hear().await, Some(Frame::Transfer(transfer)) if transfer.more));
    publishing.abort();
    let ended = async { while server.hear().await.is_some() {} };
    tokio::time::timeout(SECONDS, ended).await.unwrap();
    let why = sink.disconnected().unwrap();
    assert!(why.contains("in its middle"), "{why}");
}

#[tokio::test]
async fn a_server_that_loses_messages_is_refused() {
    let (listener, url) = listening().await;
    let sink = sink(&url);
    let probing = tokio::spawn(async move { sink.probe().await });
    let _server = Server::accept(&listener, ("RabbitMQ", "3.10.8")).await;
    let why = std::error::Error::source(&probing.await.unwrap().unwrap_err()).unwrap().to_string();
    assert!(why.contains("kind = \"rabbitmq\""), "{why}");
}

#[tokio::test]
async fn messages_that_are_nested_cut_or_aborted_end_nothing() {
    let (listener, url) = listening().await;
    let subscription = Amqp10Subscription::new(Amqp10SubscriptionOptions::new(&url, "q")).unwrap();
    let receiving = tokio::spawn(async move {
        let mut all = Vec::new();
        while all.len() < 3 {
            let arrival = subscription.receive(Bound { messages: 10, bytes: usize::MAX }).await.unwrap();
            let Arrival::Messages(some) = arrival else { panic!("{arrival:?}") };
            all.extend(some);
        }
        (subscription, all)
    });
    let mut server = Server::accept(&listener, ("other", "1")).await;
    server.attach(true).await;
    let Some(Frame::Flow(flow)) = server.hear().await else { panic!("it asks for messages") };
    assert_eq!(flow.link.unwrap().credit, 1000);
    let mut nested = vec![0x45];
    for _ in 0..20_000 {
        let mut outer = vec![0xd0];
        outer.extend((nested.len() as u32 + 4).to_be_bytes());
        outer.extend(1_u32.to_be_bytes());
        outer.extend(&nested);
        nested = outer;
    }
    let transfer = |id: u32, more: bool, aborted: bool| {
        let (none, of) = (Field::Null, Field::Bool);
        [
            Field::Uint(3),
            Field::Uint(id),
            Field::Binary(b"t"),
            Field::Uint(0),
            of(false),
            of(more),
            none,
            none,
            none,
            of(aborted),
        ]
    };
    // A body of many levels, a part that is taken back, and one that ends in the middle of a value.
    server.say(frame::TRANSFER, &transfer(1, false, false), &[&[0x00, 0x53, 0x77][..], &nested].concat()).await;
    server.say(frame::TRANSFER, &transfer(2, true, false), b"\x00\x53\x75").await;
    server.say(frame::TRANSFER, &transfer(2, false, true), b"").await;
    server.say(frame::TRANSFER, &transfer(3, false, false), b"\x00\x53\x75\xb0\xff\xff\xff\xff").await;
    server.say(frame::TRANSFER, &transfer(4, true, false), b"\x00\x53\x75\xa0\x02a").await;
    server.say(frame::TRANSFER, &transfer(4, false, false), b"b").await;
    let (mut subscription, came) = tokio::time::timeout(SECONDS, receiving).await.unwrap().unwrap();
    let unreadable = |place: usize| came[place].message.headers.contains_key(UNREADABLE_HEADER);
    assert!(unreadable(0) && unreadable(1) && !unreadable(2));
    assert_eq!(&came[2].message.payload[..], b"ab");
    // What cannot be given back, or is mixed up, ends the session.
    let mut settled = transfer(5, false, false);
    settled[4] = Field::Bool(true);
    server.say(frame::TRANSFER, &settled, b"\x00\x53\x75\xa0\x00").await;
    let why = why_over(&subscription).await;
    assert!(why.contains("before it has arrived"), "{why}");
    for (wrong, why) in [
        (vec![transfer(0, true, false), transfer(1, false, false)], "before another is whole"),
        ((0..1_001).map(|id| transfer(id, false, false)).collect(), "more messages than it was asked for"),
    ] {
        let told = tokio::spawn(async move { (why_over(&subscription).await, subscription) });
        let mut server = Server::accept(&listener, ("other", "1")).await;
        server.attach(true).await;
        for transfer in wrong {
            server.say(frame::TRANSFER, &transfer, b"\x00\x53\x75\xa0\x00").await;
        }
        let (found, again) = tokio::time::timeout(SECONDS, told).await.unwrap().unwrap();
        assert!(found.contains(why), "{found}");
        subscription = again;
    }
}

/// Why a session ends, with whatever it brings before.
async fn why_over(subscription: &Amqp10Subscription) -> String {
    loop {
        if let Err(error) = subscription.receive(Bound { messages: 1000, bytes: usize::MAX }).await {
            return std::error::Error::source(&error).unwrap().to_string();
        }
    }
}
