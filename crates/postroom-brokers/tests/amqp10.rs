//! What a real broker of AMQP 1.0 does with what the sink sends, and what the sink makes of its answers. Messages are read, and foreign ones
//! written, over AMQP 0-9-1.

#![cfg(all(feature = "amqp10", feature = "rabbitmq"))]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use lapin::options::{BasicPublishOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use postroom::{Answer, Arrival, Batch, Bound, FailureKind, Message, Received, Sink, Subscription, Verdict};
use postroom_brokers::amqp10::{Amqp10Options, Amqp10Sink, Amqp10Subscription, Amqp10SubscriptionOptions};
use postroom_brokers::rabbitmq::{RabbitmqOptions, RabbitmqSink, RabbitmqSubscription, RabbitmqSubscriptionOptions};
use postroom_brokers::{CloudEvents, SinkOptions, SubscriptionOptions};
use postroom_testkit::authority::Authority;
use postroom_testkit::rabbitmq::{AuditQueue, QueueKind};
use postroom_testkit::services::{RabbitServer, RabbitTls};
use postroom_testkit::surroundings;

/// One broker for all tests that do not kill it. It ends with this process.
static SERVER: OnceLock<RabbitServer> = OnceLock::new();

async fn server() -> &'static RabbitServer {
    let started =
        || SERVER.get_or_init(|| RabbitServer::start_newer(&surroundings::scratch("rabbitmq4"), None).unwrap());
    tokio::task::spawn_blocking(started).await.unwrap()
}

fn options(server: &RabbitServer, address: &str) -> Amqp10Options {
    let mut options = Amqp10Options::new(format!("amqp://guest:guest@127.0.0.1:{}", server.port()), address);
    options.publish_deadline_seconds = 10;
    options
}

async fn published(options: &Amqp10Options, messages: &[Message]) -> Vec<Verdict> {
    let sink = Amqp10Sink::new(options.clone()).unwrap();
    let mut verdicts = sink.publish(&Batch::new(messages.iter().cloned())).await.unwrap();
    sink.close().await;
    (0..messages.len()).map(|place| verdicts.take(place)).collect()
}

fn failed(verdict: &Verdict) -> (FailureKind, &str) {
    match verdict {
        Verdict::Failed(failure) => (failure.kind, &failure.reason),
        other => panic!("{other:?}"),
    }
}

fn message() -> Message {
    Message::new("orders", "order.placed", "x").key("k")
}

/// A queue with these arguments.
async fn declare(server: &RabbitServer, name: &str, arguments: &[(&str, AMQPValue)]) {
    let connection = Connection::connect(&server.url(), ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let mut table = FieldTable::default();
    for (name, value) in arguments {
        table.insert((*name).into(), value.clone());
    }
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(name.into(), durable, table).await.unwrap();
}

fn receiving(server: &RabbitServer, queue: &str) -> Amqp10Subscription {
    let url = format!("amqp://guest:guest@127.0.0.1:{}", server.port());
    Amqp10Subscription::new(Amqp10SubscriptionOptions::new(url, format!("/queues/{queue}"))).unwrap()
}

/// Receives so many.
async fn received(subscription: &dyn Subscription, messages: usize) -> Vec<Received> {
    let mut all = Vec::new();
    while all.len() < messages {
        let bound = Bound { messages: 1000, bytes: usize::MAX };
        let arrival =
            tokio::time::timeout(Duration::from_secs(30), subscription.receive(bound)).await.unwrap().unwrap();
        let Arrival::Messages(some) = arrival else { panic!("{arrival:?}") };
        all.extend(some);
    }
    all
}

fn ids(received: &[Received]) -> Vec<String> {
    received.iter().map(|received| received.id.unwrap().to_string()).collect()
}

#[tokio::test]
async fn a_message_carries_what_it_is_to_receivers_of_both_protocols() {
    let server = server().await;
    let exchange = format!("e-{}", surroundings::unique());
    let audit = AuditQueue::bound(&server.url(), &exchange, "order.placed").await;
    let address = format!("/exchanges/{exchange}/{{type}}");
    let sent = message().tenant("t").aggregate("order", "o-1", 7).content_type("text/plain").header("n ä", "v:\n");
    // Of several frames, in both directions.
    let large = Message::new("orders", "order.placed", vec![b'x'; 3 << 20]).key("k");
    let batch = [sent.clone(), large.clone(), message()];
    for _ in 0..2 {
        assert!(published(&options(server, &address), &batch).await.iter().all(|verdict| *verdict == Verdict::Stored));
    }
    let subscription = receiving(server, audit.name());
    let came = received(&subscription, 3).await;
    let expected = Message { routing_key: Some("order.placed".to_owned()), ..sent.clone() };
    assert_eq!(format!("{:?}", came[0].message), format!("{expected:?}"));
    assert!(came[1].message.payload == large.payload && !came[0].redelivered);
    let answers: Vec<_> = came[..3].iter().map(|received| (received.receipt, Answer::Ack)).collect();
    subscription.settle(&answers).await.unwrap();
    subscription.close().await;
    let stored = audit.drain().await;
    assert_eq!(
        (stored.len(), stored[0].id.as_str(), stored[0].body.as_slice()),
        (3, sent.id.to_string().as_str(), &b"x"[..])
    );
    let headers = stored[0].properties.headers().as_ref().unwrap().inner();
    let header = |name: &str| headers.get(name).map(|value| format!("{value:?}"));
    assert_eq!(header("aggregate-version").as_deref(), Some("LongLongInt(7)"));
    assert!(header("postroom-key").unwrap().contains("[107]") && header("n ä").is_some(), "{headers:?}");
    assert_eq!(stored[0].properties.content_type().as_ref().unwrap().as_str(), "text/plain");
    assert_eq!(stored[0].properties.delivery_mode(), &Some(2), "it survives the broker");
    assert!(stored[1].body == large.payload);
}

#[tokio::test]
async fn an_event_is_one_of_cloudevents() {
    let server = server().await;
    let exchange = format!("e-{}", surroundings::unique());
    let audit = AuditQueue::bound(&server.url(), &exchange, "order.placed").await;
    let sent = message().header("cloudEvents:id", "forged").header("traceparent", "00-1-2-01");
    for mode in [CloudEvents::Binary, CloudEvents::Structured] {
        let mut options = options(server, &format!("/exchanges/{exchange}/{{type}}"));
        (options.cloudevents, options.source) = (Some(mode), Some("/shop".to_owned()));
        for _ in 0..2 {
            assert_eq!(published(&options, std::slice::from_ref(&sent)).await, [Verdict::Stored]);
        }
    }
    let subscription = receiving(server, audit.name());
    let came = received(&subscription, 1).await;
    let expected = Message { routing_key: Some("order.placed".to_owned()), ..sent.clone() };
    assert_eq!(format!("{:?}", came[0].message), format!("{expected:?}"), "receivers of postroom get the message");
    subscription.settle(&[(came[0].receipt, Answer::Ack)]).await.unwrap();
    subscription.close().await;
    let stored = audit.drain().await;
    assert_eq!(stored.len(), 3);
    let headers = stored[0].properties.headers().as_ref().unwrap().inner();
    let header = |name: &str| headers.get(name).map(|value| format!("{value:?}"));
    let of = |text: &str| Some(format!("{:?}", AMQPValue::LongString(text.into())));
    assert_eq!((header("cloudEvents:id"), header("cloudEvents:source")), (of(&sent.id.to_string()), of("/shop")));
    let event: serde_json::Value = serde_json::from_slice(&stored[2].body).unwrap();
    assert_eq!((&event["id"], &event["data_base64"]), (&sent.id.to_string().into(), &"eA==".into()));
    let kind = stored[2].properties.content_type().as_ref().unwrap();
    assert!(kind.as_str().starts_with("application/cloudevents+json"));
}

#[tokio::test]
async fn what_a_broker_does_not_take_is_judged_by_its_reason() {
    let server = server().await;
    let name = format!("q-{}", surroundings::unique());
    let rejecting =
        [("x-max-length", AMQPValue::LongInt(2)), ("x-overflow", AMQPValue::LongString("reject-publish".into()))];
    declare(server, &name, &rejecting).await;
    let of = |address: &str| options(server, address);
    let messages: Vec<Message> = (0..20).map(|_| message()).collect();
    let verdicts = published(&of(&format!("/queues/{name}")), &messages).await;
    assert_eq!(verdicts[0], Verdict::Stored);
    // A full queue is no message's fault.
    let (kind, reason) = failed(&verdicts[19]);
    assert!(kind == FailureKind::Busy && reason.contains("rejected"), "{reason}");
    // Nobody is bound to it.
    let verdicts = published(&of("/exchanges/amq.topic/{routing_key}"), &[message().routing_key("nobody")]).await;
    let (kind, reason) = failed(&verdicts[0]);
    assert!(kind == FailureKind::Transient && reason.contains("no queue takes it"), "{reason}");
    // What AMQP 1.0 does not carry, and what the address needs.
    let strange = [message().content_type("text/ä"), message(), Message::new("orders", "k", "x")];
    let verdicts = published(&of("/queues/{key}"), &strange).await;
    assert!(failed(&verdicts[0]).1.contains("ASCII"), "{verdicts:?}");
    assert!(failed(&verdicts[1]).0 == FailureKind::Transient, "there is no queue k: {verdicts:?}");
    assert!(failed(&verdicts[2]).1.contains("address needs the field key"), "{verdicts:?}");
    // Larger than the broker takes: 16 MiB.
    let large = Message::new("orders", "k", vec![0; 17 << 20]);
    declare(server, &format!("{name}-2"), &[]).await;
    let verdicts = published(&of(&format!("/queues/{name}-2")), &[message(), large, message()]).await;
    assert_eq!((&verdicts[0], &verdicts[2]), (&Verdict::Stored, &Verdict::Stored));
    let (kind, reason) = failed(&verdicts[1]);
    assert!(kind == FailureKind::Permanent && reason.contains("max-message-size"), "{reason}");
}

#[tokio::test]
async fn foreign_messages_are_received_as_far_as_they_can_be_read() {
    let server = server().await;
    let name = format!("q-{}", surroundings::unique());
    declare(server, &name, &[]).await;
    let connection = Connection::connect(&server.url(), ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let mut nested = FieldTable::default();
    for _ in 0..40 {
        let mut outer = FieldTable::default();
        outer.insert("inner".into(), AMQPValue::FieldTable(nested));
        nested = outer;
    }
    nested.insert("plain".into(), AMQPValue::LongString("text".into()));
    nested.insert("number".into(), AMQPValue::LongInt(-7));
    nested.insert("flag".into(), AMQPValue::Boolean(true));
    let id = message().id;
    let properties = BasicProperties::default()
        .with_message_id(id.to_string().as_str().into())
        .with_type("foreign.type".into())
        .with_headers(nested);
    let no_options = BasicPublishOptions::default;
    channel.basic_publish("".into(), name.as_str().into(), no_options(), b"one", properties).await.unwrap();
    channel
        .basic_publish("".into(), name.as_str().into(), no_options(), b"", BasicProperties::default())
        .await
        .unwrap();
    let subscription = receiving(server, &name);
    let came = received(&subscription, 2).await;
    assert_eq!((came[0].id, &came[0].message.payload[..]), (Some(id), &b"one"[..]));
    let header = |name: &str| came[0].message.headers.get(name).map(String::as_str);
    assert_eq!((header("plain"), header("number"), header("flag")), (Some("text"), Some("-7"), Some("true")));
    assert_eq!(came[0].message.topic, format!("/queues/{name}"));
    assert!(came[1].id.is_none() && came[1].message.payload.is_empty());
}

/// One end may speak AMQP 0-9-1, and the other 1.0.
#[tokio::test]
async fn a_message_is_the_same_whichever_of_both_protocols_carries_it() {
    let server = server().await;
    let exchange = format!("e-{}", surroundings::unique());
    let audit = AuditQueue::bound(&server.url(), &exchange, "#").await;
    let sent = message()
        .tenant("t")
        .aggregate("order", "o-1", 7)
        .routing_key("route.1")
        .content_type("text/plain")
        .header("postroom-type", "own")
        .header("long", "x".repeat(5_000))
        .header("nul", "a\0b");
    let sent = Message { key: Some("k\0".to_owned()), ..sent };
    let over_1_0 = Amqp10Sink::new(options(server, &format!("/exchanges/{exchange}/{{routing_key}}"))).unwrap();
    let mut over_0_9 = RabbitmqOptions::new(server.url());
    over_0_9.exchange.clone_from(&exchange);
    let over_0_9 = RabbitmqSink::new(over_0_9).unwrap();
    let sinks: [&dyn Sink; 2] = [&over_1_0, &over_0_9];
    let queue = RabbitmqSubscriptionOptions {
        url: server.url(),
        queue: audit.name().to_owned(),
        bind: Vec::new(),
        prefetch: 10,
        unsettled_bytes_max: 1 << 20,
    };
    let by_0_9 = RabbitmqSubscription::new(queue).unwrap();
    let by_1_0 = receiving(server, audit.name());
    for (at, sink) in sinks.into_iter().enumerate() {
        for subscription in [&by_0_9 as &dyn Subscription, &by_1_0] {
            let mut verdicts = sink.publish(&Batch::new([sent.clone()])).await.unwrap();
            assert_eq!(verdicts.take(0), Verdict::Stored);
            let came = received(subscription, 1).await.remove(0);
            subscription.settle(&[(came.receipt, Answer::Ack)]).await.unwrap();
            subscription.close().await;
            assert_eq!(came.message.headers, sent.headers, "sink {at}");
            assert_eq!(format!("{:?}", came.message), format!("{sent:?}"), "sink {at}");
        }
    }
}

#[tokio::test]
async fn a_stream_is_refused_and_so_is_a_routing_key_that_ends_other_consumers() {
    let server = server().await;
    let name = format!("s-{}", surroundings::unique());
    declare(server, &name, &[("x-queue-type", AMQPValue::LongString("stream".into()))]).await;
    let subscription = receiving(server, &name);
    let why = loop {
        // It is told at once, or with the first message, if the broker's version does not say it.
        published(&options(server, &format!("/queues/{name}")), &[message()]).await;
        let bound = Bound { messages: 1, bytes: 1 };
        match tokio::time::timeout(Duration::from_secs(5), subscription.receive(bound)).await {
            Ok(Err(error)) => break std::error::Error::source(&error).unwrap().to_string(),
            Ok(Ok(arrival)) => panic!("{arrival:?}"),
            Err(_) => {}
        }
    };
    assert!(why.contains("it is a stream"), "{why}");
    let long = message().routing_key("x".repeat(256));
    let verdicts = published(&options(server, "/exchanges/amq.topic/{routing_key}"), &[long]).await;
    let (kind, reason) = failed(&verdicts[0]);
    assert!(kind == FailureKind::Permanent && reason.contains("256 bytes"), "{reason}");
}

#[tokio::test]
async fn more_than_the_windows_is_received_in_order_and_what_is_rejected_is_dead_lettered() {
    let server = server().await;
    let exchange = format!("e-{}", surroundings::unique());
    let (name, dead) = (format!("q-{exchange}"), format!("dead-{exchange}"));
    declare(server, &dead, &[]).await;
    let arguments = [
        ("x-queue-type", AMQPValue::LongString("quorum".into())),
        ("x-dead-letter-exchange", AMQPValue::LongString("".into())),
        ("x-dead-letter-routing-key", AMQPValue::LongString(dead.as_str().into())),
    ];
    declare(server, &name, &arguments).await;
    let messages: Vec<Message> = (0..6_000).map(|_| message()).collect();
    for some in messages.chunks(500) {
        let verdicts = published(&options(server, &format!("/queues/{name}")), some).await;
        assert!(verdicts.iter().all(|verdict| *verdict == Verdict::Stored));
    }
    let subscription = receiving(server, &name);
    let mut all = Vec::new();
    while all.len() < messages.len() {
        let came = received(&subscription, 1).await;
        let answers: Vec<_> = came
            .iter()
            .enumerate()
            .map(|(n, received)| {
                (received.receipt, if (all.len() + n) % 100 == 7 { Answer::Reject } else { Answer::Ack })
            })
            .collect();
        subscription.settle(&answers).await.unwrap();
        // A second answer settles nothing.
        subscription.settle(&answers[..1]).await.unwrap();
        all.extend(ids(&came));
    }
    assert_eq!(all, messages.iter().map(|message| message.id.to_string()).collect::<Vec<_>>());
    let rejected = ids(&received(&receiving(server, &dead), 60).await);
    assert_eq!(rejected, all.iter().skip(7).step_by(100).cloned().collect::<Vec<_>>());
    subscription.close().await;
    assert_eq!(postroom_testkit::rabbitmq::exists(&server.url(), &name).await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_alarm_burns_no_attempt_and_a_broker_that_was_killed_has_what_it_accepted() {
    let mut server = RabbitServer::start_newer(&surroundings::scratch("rabbitmq4"), None).unwrap();
    declare(&server, "orders", &[("x-queue-type", AMQPValue::LongString("quorum".into()))]).await;
    let sink =
        Amqp10Sink::new(Amqp10Options { publish_deadline_seconds: 3, ..options(&server, "/queues/orders") }).unwrap();
    let publish = async |messages: &[Message]| sink.publish(&Batch::new(messages.iter().cloned())).await;
    let first: Vec<Message> = (0..100).map(|_| message()).collect();
    let mut verdicts = publish(&first).await.unwrap();
    assert!((0..100).all(|place| verdicts.take(place) == Verdict::Stored));
    server.memory_alarm(true).unwrap();
    let error = publish(&[message()]).await.unwrap_err();
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert!(why.contains("taken no more") || why.contains("no outcome"), "{why}");
    assert!(sink.probe().await.is_err(), "it is not back");
    server.memory_alarm(false).unwrap();
    server.kill().unwrap();
    assert!(publish(&[message()]).await.is_err() && sink.probe().await.is_err());
    server.start_again().unwrap();
    sink.probe().await.unwrap();
    let last = message();
    // A quorum queue takes a moment to have a leader again.
    let again = async || {
        (publish(std::slice::from_ref(&last)).await).is_ok_and(|mut verdicts| verdicts.take(0) == Verdict::Stored)
    };
    let stored = async { while !again().await {} };
    tokio::time::timeout(Duration::from_secs(60), stored).await.unwrap();
    sink.close().await;
    let came = ids(&received(&receiving(&server, "orders"), 101).await);
    let expected: Vec<String> = first.iter().map(|message| message.id.to_string()).collect();
    assert_eq!(came[..100], expected);
    assert!(came[100..].contains(&last.id.to_string()), "{came:?}");
}

#[tokio::test]
async fn what_is_wrong_with_a_broker_or_an_option_is_told() {
    let server = server().await;
    let name = format!("q-{}", surroundings::unique());
    declare(server, &name, &[]).await;
    let at = format!("127.0.0.1:{}", server.port());
    let of = |login: &str, address: &str| Amqp10Options::new(format!("amqp://{login}{at}"), address);
    let there = format!("/queues/{name}");
    let found = of("guest:guest@", &there).check().await.unwrap();
    assert!(found.contains("up to 16777216 bytes") && found.contains("not encrypted"), "{found}");
    assert!(of("guest:guest@", "/exchanges/amq.topic/{type}").check().await.unwrap().contains("first message"));
    let missing = of("guest:guest@", "/exchanges/missing/{type}").check().await.unwrap_err();
    assert!(missing.problem.contains("not-found"), "{missing:?}");
    let error = of("guest:s3cret@", &there).check().await.unwrap_err();
    assert!(error.problem.contains(&at) && error.advice.contains("user and the password"), "{error:?}");
    assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
    let error = of("guest:guest@", "/queues/missing").check().await.unwrap_err();
    assert!(error.problem.contains("/queues/missing") && error.problem.contains("not-found"), "{error:?}");
    let url = format!("amqp://guest:guest@{at}/elsewhere");
    let error = Amqp10Options::new(url, &there).check().await.unwrap_err();
    assert!(error.problem.contains("elsewhere"), "{error:?}");
    let receiving = |address: &str| Amqp10SubscriptionOptions::new(format!("amqp://guest:guest@{at}"), address);
    assert!(receiving(&there).check(&[]).await.unwrap().contains(&name));
    assert!(receiving("/queues/missing").check(&[]).await.unwrap_err().problem.contains("not-found"));
    for address in ["", "{nonsense}", "a\nb"] {
        assert!(Amqp10Sink::new(of("", address)).is_err(), "{address}");
    }
    assert!(Amqp10Sink::new(of(":s3cret@", "q")).err().unwrap().to_string().contains("no user"));
    let nobody = Amqp10Options::new("amqp://127.0.0.1:1", "x").check().await.unwrap_err();
    assert!(nobody.problem.contains("127.0.0.1:1") && nobody.advice.contains("start the broker"), "{nobody:?}");
    // RabbitMQ 3.10 without its plugin speaks another version of AMQP on this port.
    let old = surroundings::rabbitmq_url();
    let old = old.split_once('@').unwrap().1.split('/').next().unwrap();
    let error = Amqp10Options::new(format!("amqp://guest:guest@{old}"), "/queue/q").check().await.unwrap_err();
    assert!(error.problem.contains("does not speak AMQP 1.0"), "{error:?}");
}

#[tokio::test]
async fn a_broker_with_tls_is_verified_and_may_ask_for_a_certificate() {
    let dir = surroundings::scratch("amqp10-tls");
    let authority = Authority::create(&dir, "relay");
    let path = |path: &Path| path.display().to_string();
    let (root, issued, client) = (&authority.root, &authority.server, &authority.client);
    let tls = RabbitTls::new(root, &issued.certificate, &issued.key, true);
    let server = RabbitServer::start_newer(&surroundings::scratch("rabbitmq4-tls"), Some(tls)).unwrap();
    let audit = AuditQueue::named(&server.url(), "e", "#", "q", QueueKind::Classic).await;
    let url = server.tls_url().unwrap().replace("127.0.0.1", "localhost").replace("/%2f", "");
    let of = |query: &str| Amqp10Options::new(format!("{url}?{query}"), "/queues/q");
    let root = path(root);
    let trusted = format!("cacertfile={root}&certfile={}&keyfile={}", path(&client.certificate), path(&client.key));
    let found = of(&trusted).check().await.unwrap();
    assert!(found.contains("encrypted with TLS"), "{found}");
    assert_eq!(published(&of(&trusted), &[message()]).await, [Verdict::Stored]);
    assert!(of(&format!("cacertfile={root}")).check().await.is_err(), "it asks for a certificate");
    assert!(of("").check().await.unwrap_err().problem.contains("certificate"));
    assert_eq!(audit.drain().await.len(), 1);
}
