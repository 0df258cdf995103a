//! The RabbitMQ sink and subscription against a real broker.

#![cfg(feature = "rabbitmq")]
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use lapin::options::{QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ConnectionProperties};
use postroom::{Answer, Batch, FailureKind, Message, MessageId, PAYLOAD_BYTES_MAX, Sink, Subscription, Verdict};
use postroom_brokers::rabbitmq::{
    Binding, RabbitmqOptions, RabbitmqSink, RabbitmqSubscription, RabbitmqSubscriptionOptions,
};
use postroom_testkit::conformance::subscription::one;
use postroom_testkit::rabbitmq::AuditQueue;
use postroom_testkit::services::RabbitServer;
use postroom_testkit::surroundings;

fn options(url: &str) -> RabbitmqOptions {
    let mut options = RabbitmqOptions::new(url);
    options.exchange = format!("e-{}", surroundings::unique());
    options
}

async fn verdict(sink: &RabbitmqSink, message: &Message) -> Verdict {
    let mut verdicts = sink.publish(&Batch::new(vec![message.clone()])).await.unwrap();
    verdicts.take(0)
}

#[tokio::test]
async fn a_message_arrives_with_all_its_properties_and_bytes() {
    let options = options(&surroundings::rabbitmq_url());
    let audit = AuditQueue::bound(&options.url, &options.exchange, "#").await;
    let sink = RabbitmqSink::new(options.clone()).unwrap();
    let payloads: [Vec<u8>; 4] = [vec![], b"a\0b".to_vec(), vec![0xff, 0xc3, 0x28], vec![9; PAYLOAD_BYTES_MAX]];
    let messages: Vec<Message> = payloads
        .iter()
        .map(|payload| {
            Message::new("orders", "order.placed", payload.clone())
                .aggregate("order", "o-1", 7)
                .tenant("t-1")
                .header("nul", "a\0b")
                .traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        })
        .collect();
    let mut verdicts = sink.publish(&Batch::new(messages.clone())).await.unwrap();
    assert!((0..messages.len()).all(|place| verdicts.take(place) == Verdict::Stored));
    let stored = audit.drain().await;
    assert_eq!(stored.len(), messages.len());
    for (stored, message) in stored.iter().zip(&messages) {
        assert!(stored.body == message.payload, "{} bytes came out differently", message.payload.len());
        assert_eq!(stored.id, message.id.to_string());
        assert_eq!(stored.routing_key, "order.placed", "the type, when there is no routing key");
        let properties = &stored.properties;
        assert_eq!(properties.delivery_mode(), &Some(2), "persistent");
        assert_eq!(properties.kind().as_ref().unwrap().as_str(), "order.placed");
        let headers = properties.headers().as_ref().unwrap().inner();
        let text = |name: &str| match &headers[name] {
            AMQPValue::LongString(text) => String::from_utf8(text.as_bytes().to_vec()).unwrap(),
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(
            (text("aggregate-type"), text("aggregate-id"), text("tenant-id")),
            ("order".into(), "o-1".into(), "t-1".into())
        );
        assert_eq!(headers["aggregate-version"], AMQPValue::LongLongInt(7));
        assert_eq!((text("nul").as_str(), text("postroom-topic").as_str()), ("a\0b", "orders"));
        assert!(text("traceparent").starts_with("00-0af7"));
    }
    sink.close().await;
}

#[tokio::test]
async fn what_the_sink_sent_the_subscription_reads() {
    let options = options(&surroundings::rabbitmq_url());
    let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
        url: options.url.clone(),
        queue: format!("q-{}", options.exchange),
        bind: vec![Binding::new(&options.exchange, "#")],
        prefetch: 10,
        unsettled_bytes_max: 64 << 20,
    })
    .unwrap();
    subscription.connect().await.unwrap();
    let sink = RabbitmqSink::new(options).unwrap();
    let sent = Message::new("orders", "order.placed", vec![0u8, 255])
        .key("k")
        .aggregate("order", "o-1", 7)
        .tenant("t-1")
        .content_type("application/x")
        .header("h", "v")
        .header("tenant-id", "of its own, and not the tenant")
        .header("postroom-header-tenant-id", "with a name that is taken as well");
    assert_eq!(verdict(&sink, &sent).await, Verdict::Stored);
    let first = one(&subscription).await.unwrap();
    assert!(!first.redelivered);
    subscription.settle(&[(first.receipt, Answer::Requeue)]).await.unwrap();
    let received = one(&subscription).await.unwrap();
    assert!(received.redelivered);
    let message = &received.message;
    assert_eq!((received.id, &message.payload, &message.headers), (Some(sent.id), &sent.payload, &sent.headers));
    assert_eq!((&message.topic, &message.kind, message.ordering_key()), (&sent.topic, &sent.kind, Some("k")));
    assert_eq!((&message.aggregate_id, message.aggregate_version), (&sent.aggregate_id, Some(7)));
    assert_eq!((&message.tenant_id, &message.content_type), (&sent.tenant_id, &sent.content_type));
    subscription.settle(&[(received.receipt, Answer::Ack)]).await.unwrap();
}

#[tokio::test]
async fn returned_messages_are_told_apart_in_one_batch() {
    let options = options(&surroundings::rabbitmq_url());
    let audit = AuditQueue::bound(&options.url, &options.exchange, "bound.#").await;
    let sink = RabbitmqSink::new(options).unwrap();
    let messages: Vec<Message> = (0..200)
        .map(|n| Message::new("t", "k", "x").routing_key(if n % 3 == 0 { "nowhere" } else { "bound.here" }))
        .collect();
    let mut verdicts = sink.publish(&Batch::new(messages.clone())).await.unwrap();
    for (place, message) in messages.iter().enumerate() {
        let verdict = verdicts.take(place);
        if message.address() == "nowhere" {
            assert!(
                matches!(&verdict, Verdict::Failed(failure) if failure.kind == FailureKind::Transient),
                "{verdict:?}"
            );
        } else {
            assert_eq!(verdict, Verdict::Stored);
        }
    }
    assert_eq!(audit.drain().await.len(), 133);
}

#[tokio::test]
async fn a_queue_that_is_full_pushes_back_and_nothing_is_stored() {
    let options = options(&surroundings::rabbitmq_url());
    let sink = RabbitmqSink::new(options.clone()).unwrap();
    sink.probe().await.unwrap();
    let connection = Connection::connect(&options.url, ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let mut limits = FieldTable::default();
    limits.insert("x-max-length".into(), AMQPValue::LongInt(1));
    limits.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    let queue = format!("full-{}", options.exchange);
    channel.queue_declare(queue.as_str().into(), QueueDeclareOptions::durable(), limits).await.unwrap();
    let exchange = options.exchange.as_str();
    channel
        .queue_bind(
            queue.as_str().into(),
            exchange.into(),
            "#".into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await
        .unwrap();
    let messages: Vec<Message> = (0..5).map(|_| Message::new("t", "k", "x")).collect();
    let mut stored = 0;
    for message in &messages {
        match verdict(&sink, message).await {
            Verdict::Stored => stored += 1,
            Verdict::Failed(failure) => assert_eq!(failure.kind, FailureKind::Busy),
            other => panic!("{other:?}"),
        }
    }
    let passive = QueueDeclareOptions { passive: true, ..Default::default() };
    let held =
        channel.queue_declare(queue.as_str().into(), passive, FieldTable::default()).await.unwrap().message_count();
    assert_eq!(stored, held);
    assert!(stored < 5, "the limit pushed back");
}

/// In a table that is not ours ids may repeat. The broker names a returned message by its id alone.
#[tokio::test]
async fn of_two_messages_with_one_id_none_is_taken_for_stored_when_one_comes_back() {
    let options = options(&surroundings::rabbitmq_url());
    let _audit = AuditQueue::bound(&options.url, &options.exchange, "bound.#").await;
    let sink = RabbitmqSink::new(options).unwrap();
    let one = Message::new("t", "k", "x").routing_key("bound.here");
    let other = Message::new("t", "k", "y").routing_key("nowhere").id(one.id);
    let third = Message::new("t", "k", "z").routing_key("bound.here");
    let mut verdicts = sink.publish(&Batch::new([one, other, third])).await.unwrap();
    for place in 0..2 {
        let verdict = verdicts.take(place);
        assert!(matches!(&verdict, Verdict::Failed(failure) if failure.kind == FailureKind::Transient), "{verdict:?}");
    }
    assert_eq!(verdicts.take(2), Verdict::Stored);
}

#[tokio::test]
async fn a_missing_exchange_is_unavailable_and_judges_nobody() {
    let mut options = options(&surroundings::rabbitmq_url());
    options.declare = false;
    let sink = RabbitmqSink::new(options).unwrap();
    assert!(sink.probe().await.is_err());
    assert!(sink.publish(&Batch::new(vec![Message::new("t", "k", "x")])).await.is_err());
}

#[tokio::test]
async fn a_message_over_which_the_broker_closes_the_channel_is_found_when_it_is_alone() {
    let mut broker = RabbitServer::start(&surroundings::scratch("refusing").join("rabbitmq")).unwrap();
    let options = options(&broker.url());
    let audit = AuditQueue::bound(&options.url, &options.exchange, "#").await;
    // Topic permissions: guest may write no routing key but those that begin with "allowed".
    broker.ctl(&["set_topic_permissions", "guest", &options.exchange, "^allowed", ".*"]).unwrap();
    let sink = RabbitmqSink::new(options.clone()).unwrap();
    let refused = Message::new("t", "k", "x").routing_key("forbidden");
    let good = Message::new("t", "k", "x").routing_key("allowed.key");
    // In company nobody knows whose fault it was, and nobody is taken for stored.
    let mut verdicts = sink.publish(&Batch::new(vec![refused.clone(), good.clone()])).await.unwrap();
    assert!(matches!(verdicts.take(0), Verdict::Unknown(_)));
    assert_ne!(verdicts.take(1), Verdict::Stored);
    // The second message was on its way when the broker closed the channel, for which it may close the connection too. The
    // relay probes and publishes one by one until the culprit stands alone; so does this.
    let alone = loop {
        sink.probe().await.unwrap();
        let outcome = sink.publish(&Batch::new(vec![refused.clone()])).await;
        match outcome.map(|mut verdicts| verdicts.take(0)) {
            Ok(Verdict::Unknown(_)) | Err(_) => {}
            Ok(verdict) => break verdict,
        }
    };
    assert!(matches!(&alone, Verdict::Failed(failure) if failure.reason.contains("ACCESS")), "{alone:?}");
    assert_eq!(verdict(&sink, &good).await, Verdict::Stored);
    assert!(audit.drain().await.iter().all(|stored| stored.id == good.id.to_string()));
    // An exchange that nothing may be written to is nobody's fault but the permissions': no message is judged over it.
    broker.ctl(&["clear_topic_permissions", "guest"]).unwrap();
    broker.ctl(&["set_permissions", "guest", ".*", "^nothing$", ".*"]).unwrap();
    // The broker keeps what it once allowed a channel; a new connection asks again.
    let sink = RabbitmqSink::new(options).unwrap();
    for _ in 0..3 {
        let outcome = sink.publish(&Batch::new(vec![good.clone()])).await;
        let verdict = outcome.map(|mut verdicts| verdicts.take(0));
        assert!(!matches!(&verdict, Ok(Verdict::Failed(_) | Verdict::Stored)), "{verdict:?}");
        let _ = sink.probe().await;
    }
    broker.stop().unwrap();
}

#[tokio::test]
async fn sink_and_subscription_recover_after_the_broker_was_killed() {
    let mut broker = RabbitServer::start(&surroundings::scratch("killed").join("rabbitmq")).unwrap();
    let mut options = options(&broker.url());
    options.publish_deadline_seconds = 5;
    let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
        url: options.url.clone(),
        queue: "q".to_owned(),
        bind: vec![Binding::new(&options.exchange, "#")],
        prefetch: 10,
        unsettled_bytes_max: 64 << 20,
    })
    .unwrap();
    subscription.connect().await.unwrap();
    let sink = RabbitmqSink::new(options).unwrap();
    let message = Message::new("t", "k", "x");
    assert_eq!(verdict(&sink, &message).await, Verdict::Stored);
    let before = one(&subscription).await.unwrap();
    broker.kill().unwrap();
    let silent = sink.publish(&Batch::new(vec![message.clone()])).await;
    assert!(silent.is_err_and(|error| error.to_string().contains("RabbitMQ")), "nobody is there to judge");
    assert!(one(&subscription).await.is_err());
    broker.start_again().unwrap();
    assert!(
        subscription.settle(&[(before.receipt, Answer::Ack)]).await.is_err(),
        "a tag of the old connection settles nothing"
    );
    let again = one(&subscription).await.unwrap();
    assert_eq!(again.id, Some(message.id), "persistent, and not acked: it comes again");
    subscription.settle(&[(again.receipt, Answer::Ack)]).await.unwrap();
    sink.probe().await.unwrap();
    assert_eq!(verdict(&sink, &Message::new("t", "k", "y")).await, Verdict::Stored);
    assert_eq!(one(&subscription).await.unwrap().message.payload.as_ref(), b"y");
    broker.stop().unwrap();
}

#[tokio::test]
async fn a_broker_that_says_nothing_is_given_up_after_the_deadline() {
    let mut broker = RabbitServer::start(&surroundings::scratch("silent").join("rabbitmq")).unwrap();
    let mut options = options(&broker.url());
    options.publish_deadline_seconds = 2;
    let sink = RabbitmqSink::new(options).unwrap();
    sink.probe().await.unwrap();
    broker.pause().unwrap();
    let ids: Vec<MessageId> = (0..3).map(|_| MessageId::new()).collect();
    let messages: Vec<Message> = ids.iter().map(|id| Message::new("t", "k", "x").id(*id)).collect();
    let outcome = tokio::time::timeout(Duration::from_secs(60), sink.publish(&Batch::new(messages))).await;
    assert!(outcome.expect("it ends by itself").is_err());
    broker.resume().unwrap();
    broker.stop().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_alarm_is_told_and_a_channel_that_is_opened_meanwhile_waits_for_its_end() {
    let broker = RabbitServer::start(&surroundings::scratch("alarm").join("rabbitmq")).unwrap();
    let mut options = options(&broker.url());
    (options.publish_deadline_seconds, options.channels) = (1, 2);
    let _audit = AuditQueue::bound(&options.url, &options.exchange, "#").await;
    let sink = RabbitmqSink::new(options).unwrap();
    let message = || Message::new("orders", "order.placed", "x");
    assert_eq!(verdict(&sink, &message()).await, Verdict::Stored);
    assert_eq!(sink.blocked(), None);
    broker.memory_alarm(true).unwrap();
    let (first, second) = (message(), message());
    let opens_late = async {
        // The first has the only open channel; when the connection is blocked, the second has to open another.
        while sink.blocked().is_none() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(sink.blocked().unwrap().contains("alarm"));
        verdict(&sink, &second).await
    };
    let alarm_ends = async {
        while sink.blocked().is_none() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // Longer than the deadline: the length of the alarm is the fault itself.
        tokio::time::sleep(Duration::from_secs(3)).await;
        broker.memory_alarm(false).unwrap();
    };
    let (first, second, ()) = tokio::join!(verdict(&sink, &first), opens_late, alarm_ends);
    assert_eq!((first, second), (Verdict::Stored, Verdict::Stored));
    assert_eq!(sink.blocked(), None);
    sink.close().await;
}
