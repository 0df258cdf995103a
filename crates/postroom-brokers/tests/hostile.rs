//! Bytes that the client library does not survive, from a real broker where one lets them through.

#![cfg(feature = "rabbitmq")]
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use postroom::{Answer, Received, Sink, Subscription, UNREADABLE_HEADER};
use postroom_brokers::rabbitmq::{
    Binding, RabbitmqOptions, RabbitmqSink, RabbitmqSubscription, RabbitmqSubscriptionOptions,
};
use postroom_testkit::conformance::subscription::one;
use postroom_testkit::surroundings;

/// A publisher that writes AMQP byte by byte, because no client library writes these.
struct RawPublisher(TcpStream);

fn short(text: &[u8]) -> Vec<u8> {
    [&[text.len() as u8], text].concat()
}

fn long(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes(), bytes].concat()
}

fn frame(kind: u8, channel: u16, payload: &[u8]) -> Vec<u8> {
    [&[kind][..], &channel.to_be_bytes(), &long(payload), &[0xce]].concat()
}

fn read_frame(socket: &mut TcpStream) -> Vec<u8> {
    let mut head = [0; 7];
    socket.read_exact(&mut head).unwrap();
    let size = u32::from_be_bytes(head[3..].try_into().unwrap()) as usize;
    let mut payload = vec![0; size + 1];
    socket.read_exact(&mut payload).unwrap();
    payload.truncate(size);
    payload
}

impl RawPublisher {
    fn connect(url: &str) -> Self {
        let address = url.split('@').nth(1).unwrap().split('/').next().unwrap();
        let mut this = Self(TcpStream::connect(address).unwrap());
        this.0.write_all(b"AMQP\0\0\x09\x01").unwrap();
        this.expect(10, 10);
        let start_ok = [&long(b"")[..], &short(b"PLAIN"), &long(b"\0guest\0guest"), &short(b"en_US")].concat();
        this.method(0, 10, 11, &start_ok);
        this.expect(10, 30);
        this.method(0, 10, 31, &[&2047u16.to_be_bytes()[..], &131_072u32.to_be_bytes(), &[0, 0]].concat());
        this.method(0, 10, 40, &[&short(b"/")[..], &short(b""), &[0]].concat());
        this.expect(10, 41);
        this.method(1, 20, 10, &short(b""));
        this.expect(20, 11);
        this.method(1, 85, 10, &[0]);
        this.expect(85, 11);
        this
    }

    fn method(&mut self, channel: u16, class: u16, method: u16, arguments: &[u8]) {
        let payload = [&class.to_be_bytes()[..], &method.to_be_bytes(), arguments].concat();
        self.0.write_all(&frame(1, channel, &payload)).unwrap();
    }

    /// The next frame is this method; anything else is the broker's refusal.
    fn expect(&mut self, class: u16, method: u16) {
        let payload = read_frame(&mut self.0);
        let wanted = [class.to_be_bytes(), method.to_be_bytes()].concat();
        assert_eq!(payload[..4], wanted, "{}", String::from_utf8_lossy(&payload));
    }

    /// Publishes, and waits until the broker has confirmed it: it lets these bytes through.
    fn publish(&mut self, exchange: &str, routing_key: &[u8], flags: u16, properties: &[u8], body: &[u8]) {
        let publish = [&[0, 0][..], &short(exchange.as_bytes()), &short(routing_key), &[0]].concat();
        self.method(1, 60, 40, &publish);
        let size = (body.len() as u64).to_be_bytes();
        let header = [&[0, 60, 0, 0][..], &size, &flags.to_be_bytes(), properties].concat();
        self.0.write_all(&[frame(2, 1, &header), frame(3, 1, body)].concat()).unwrap();
        self.expect(60, 80);
    }
}

const CONTENT_TYPE: u16 = 1 << 15;
const HEADERS: u16 = 1 << 13;
const MESSAGE_ID: u16 = 1 << 7;
const TYPE: u16 = 1 << 5;
const APP_ID: u16 = 1 << 3;
const ID: &str = "01a8a4a6-0000-7000-8000-000000000001";

/// A table with a header `h` in which tables are nested this deep.
fn nested(levels: usize) -> Vec<u8> {
    let mut content = Vec::new();
    for _ in 1..levels {
        content = [b"\x01nF", &long(&content)[..]].concat();
    }
    [b"\x01hF", &long(&content)[..], b"\x0cpostroom-key", b"S", &long(b"k")[..]].concat()
}

struct Queue {
    publisher: RawPublisher,
    subscription: RabbitmqSubscription,
    exchange: String,
}

impl Queue {
    async fn bound() -> Self {
        let url = surroundings::rabbitmq_url();
        let exchange = format!("hostile-{}", surroundings::unique());
        let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
            url: url.clone(),
            queue: format!("q-{exchange}"),
            bind: vec![Binding::new(&exchange, "#")],
            prefetch: 10,
            unsettled_bytes_max: 64 << 20,
        })
        .unwrap();
        subscription.connect().await.unwrap();
        Self { publisher: RawPublisher::connect(&url), subscription, exchange }
    }

    /// Publishes one hostile message and a good one behind it; both are received, in their order, and acked. Returns the first.
    async fn survives(&mut self, routing_key: &[u8], flags: u16, properties: &[u8]) -> Received {
        self.publisher.publish(&self.exchange, routing_key, flags, properties, b"hostile");
        self.publisher.publish(&self.exchange, b"good", TYPE, &short(b"order.placed"), b"good");
        let hostile = one(&self.subscription).await.unwrap();
        let good = one(&self.subscription).await.unwrap();
        assert_eq!((hostile.message.payload.as_ref(), good.message.payload.as_ref()), (&b"hostile"[..], &b"good"[..]));
        assert_eq!((good.message.kind.as_str(), good.message.headers.len()), ("order.placed", 0));
        let one_session = hostile.receipt.session() == good.receipt.session();
        assert_eq!((one_session, hostile.redelivered), (true, false), "on one connection, at the first time");
        self.subscription.settle(&[(hostile.receipt, Answer::Ack)]).await.unwrap();
        self.subscription.settle(&[(good.receipt, Answer::Ack)]).await.unwrap();
        hostile
    }
}

fn reason(received: &Received) -> &str {
    received.message.headers.get(UNREADABLE_HEADER).map_or("", String::as_str)
}

#[tokio::test]
async fn a_message_whose_texts_are_not_utf8_is_received_marked_and_blocks_nothing() {
    let mut queue = Queue::bound().await;
    let id = short(ID.as_bytes());
    let received = queue.survives(b"k", CONTENT_TYPE | MESSAGE_ID, &[short(b"\xff"), id.clone()].concat()).await;
    assert_eq!(reason(&received), "text that is not UTF-8: the content type");
    assert_eq!(received.id, Some(ID.parse().unwrap()), "what can be read is there");
    let received = queue.survives(b"k", MESSAGE_ID | TYPE, &[id.clone(), short(b"a\xc3(")].concat()).await;
    assert_eq!(reason(&received), "text that is not UTF-8: the type");
    assert_eq!(received.message.kind, "a\u{fffd}(");
    let received = queue.survives(b"k", TYPE | APP_ID, &[short(b"t"), short(b"\xfe")].concat()).await;
    assert_eq!((reason(&received), received.message.kind.as_str()), ("text that is not UTF-8: the app id", "t"));
    let named = [&b"\x02\xff\xfe"[..], b"S", &long(b"v")[..], b"\x0cpostroom-key", b"S", &long(b"k")[..]].concat();
    let received = queue.survives(b"k", HEADERS | MESSAGE_ID, &[long(&named), id].concat()).await;
    assert_eq!(reason(&received), "a header name that is not UTF-8: the table of headers");
    assert_eq!((received.id.is_some(), received.message.key.as_deref()), (true, Some("k")));
    assert_eq!(received.message.headers["\u{fffd}\u{fffd}"], "v");
    // The routing key is the sender's address, and not the message: nothing of the message is unreadable.
    let received = queue.survives(b"r\xff", TYPE, &short(b"t")).await;
    assert_eq!((reason(&received), received.message.routing_key.as_deref()), ("", Some("r\u{fffd}")));
}

#[tokio::test]
async fn headers_nested_a_thousand_and_ten_thousand_deep_do_not_end_the_process() {
    let mut queue = Queue::bound().await;
    for levels in [1_000, 10_000] {
        let properties = [long(&nested(levels)), short(ID.as_bytes())].concat();
        let received = queue.survives(b"k", HEADERS | MESSAGE_ID, &properties).await;
        assert_eq!(reason(&received), "tables nested deeper than 16 levels: the header \"h\"");
        assert_eq!((received.id, received.message.key.as_deref()), (Some(ID.parse().unwrap()), Some("k")));
    }
    let received = queue.survives(b"k", HEADERS, &long(&nested(10))).await;
    assert_eq!((reason(&received), received.message.key.as_deref()), ("", Some("k")), "that deep is no harm");
}

#[tokio::test]
async fn nobody_but_the_fence_marks_a_message_as_unreadable() {
    let mut queue = Queue::bound().await;
    let forged = [&short(UNREADABLE_HEADER.as_bytes())[..], b"S", &long(b"forged")].concat();
    let received = queue.survives(b"k", HEADERS, &long(&forged)).await;
    assert_eq!(reason(&received), "");
    assert_eq!(received.message.headers["postroom-header-postroom-unreadable"], "forged");
}

/// Answers of a fake broker: the method that it reads, and the frame that it then sends.
type Answers = Vec<([u8; 4], Vec<u8>)>;

/// A socket that greets with `start` and then has an answer to some methods. No real broker sends what these tests do.
fn fake_broker(start: Vec<u8>, answers: Answers) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let (mut socket, start, answers) = (socket.unwrap(), start.clone(), answers.clone());
            std::thread::spawn(move || {
                socket.read_exact(&mut [0; 8]).unwrap();
                socket.write_all(&start).unwrap();
                // Until the client goes, which ends this thread alone.
                loop {
                    let payload = read_frame(&mut socket);
                    if let Some((_, answer)) = answers.iter().find(|(method, _)| payload.starts_with(method)) {
                        socket.write_all(answer).unwrap();
                    }
                }
            });
        }
    });
    format!("amqp://guest:guest@{address}/%2f")
}

fn start(server_properties: &[u8]) -> Vec<u8> {
    let rest = [long(b"PLAIN"), long(b"en_US")].concat();
    frame(1, 0, &[&[0, 10, 0, 10, 0, 9][..], &long(server_properties), &rest].concat())
}

/// What opens a connection whose frame size is 0, which means no limit.
fn opening() -> Answers {
    let tune = frame(1, 0, &[&[0, 10, 0, 30, 7, 255][..], &[0; 4], &[0, 60]].concat());
    vec![([0, 10, 0, 11], tune), ([0, 10, 0, 40], frame(1, 0, &[0, 10, 0, 41, 0]))]
}

async fn told_by_probe(url: String) -> String {
    let sink = RabbitmqSink::new(RabbitmqOptions::new(url)).unwrap();
    let error = tokio::time::timeout(Duration::from_secs(8), sink.probe()).await.expect("at once").unwrap_err();
    std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default()
}

#[tokio::test]
async fn a_fake_broker_with_nested_server_properties_is_unavailable_in_words_and_at_once() {
    let told = told_by_probe(fake_broker(start(&nested(10_000)), Vec::new())).await;
    assert!(told.contains("connection.start (10.10) with tables nested deeper than 16 levels"), "{told}");
}

#[tokio::test]
async fn a_fake_broker_with_nested_tables_in_an_open_connection_is_unavailable_in_words() {
    let declare = frame(1, 1, &[&[0, 50, 0, 10, 0, 0, 0, 0][..], &long(&nested(10_000))].concat());
    let answers = [opening(), vec![([0, 20, 0, 10], declare)]].concat();
    let told = told_by_probe(fake_broker(start(b""), answers)).await;
    assert!(told.contains("50.10, which no broker sends"), "{told}");
}

#[tokio::test]
async fn a_fake_broker_without_a_frame_size_gets_ours() {
    let channel = vec![
        ([0, 20, 0, 10], frame(1, 1, &[0, 20, 0, 11, 0, 0, 0, 0])),
        ([0, 40, 0, 10], frame(1, 1, &[0, 40, 0, 11])),
        ([0, 85, 0, 10], frame(1, 1, &[0, 85, 0, 11])),
    ];
    let url = fake_broker(start(b""), [opening(), channel].concat());
    RabbitmqSink::new(RabbitmqOptions::new(url)).unwrap().probe().await.unwrap();
}

#[test]
fn what_amqp_cannot_carry_is_refused_when_the_subscription_is_set_up() {
    let fine = || RabbitmqSubscriptionOptions {
        url: "amqp://guest:secret@localhost".to_owned(),
        queue: "q".repeat(255),
        bind: vec![Binding::new("e".repeat(255), "r".repeat(255))],
        prefetch: 1,
        unsettled_bytes_max: 64 << 20,
    };
    assert!(RabbitmqSubscription::new(fine()).is_ok());
    let refused = |change: &dyn Fn(&mut RabbitmqSubscriptionOptions), words: &str| {
        let mut options = fine();
        change(&mut options);
        let error = RabbitmqSubscription::new(options).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(words) && !error.contains("secret"), "{error}");
    };
    refused(&|options| options.queue.push('q'), "queue: the name has 256 bytes");
    refused(&|options| options.queue.clear(), "queue: the name is empty");
    refused(&|options| options.bind[0].exchange.push('e'), "exchange in bind: the name has 256 bytes");
    refused(&|options| options.bind[0].routing_key.push('r'), "routing_key in bind: the name has 256 bytes");
    refused(&|options| options.prefetch = 0, "prefetch must be at least 1");
    refused(&|options| options.url.push_str("?frame_max=0"), "frame_max=0");
    refused(&|options| options.url.push_str("?frame_max=4294967295"), "must be between 32768 and 1048576");
    refused(&|options| options.url.push_str("?heartbeat=soon"), "cannot be parsed");
    refused(&|options| options.url = format!("amqp://guest:secret@localhost/{}", "v".repeat(256)), "virtual host");
    refused(&|options| options.url = "http://guest:secret@localhost".to_owned(), "must begin with amqp://");
    let options = RabbitmqOptions::new(format!("amqp://guest:secret@localhost/{}", "v".repeat(256)));
    assert!(RabbitmqSink::new(options).is_err());
}
