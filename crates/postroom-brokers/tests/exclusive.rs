//! An inbox's filler is the only consumer of its queue.

#![cfg(feature = "rabbitmq")]
#![allow(clippy::unwrap_used)]

use lapin::options::{BasicPublishOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use postroom::Subscription;
use postroom_brokers::rabbitmq::{RabbitmqSubscription, RabbitmqSubscriptionOptions};
use postroom_testkit::surroundings;

fn subscription(queue: &str) -> RabbitmqSubscription {
    let (url, queue) = (surroundings::rabbitmq_url(), queue.to_owned());
    RabbitmqSubscription::new(RabbitmqSubscriptionOptions { url, queue, bind: Vec::new(), prefetch: 10 }).exclusive()
}

async fn queue_of_two(arguments: FieldTable) -> String {
    let queue = format!("exclusive-{}", surroundings::unique());
    let properties = ConnectionProperties::default();
    let connection = Connection::connect(&surroundings::rabbitmq_url(), properties).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(queue.as_str().into(), durable, arguments).await.unwrap();
    for body in ["1", "2"] {
        let options = BasicPublishOptions::default();
        let published = channel.basic_publish(
            "".into(),
            queue.as_str().into(),
            options,
            body.as_bytes(),
            BasicProperties::default(),
        );
        published.await.unwrap().await.unwrap();
    }
    queue
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_one_gets_nothing_before_the_last_one_is_gone_and_then_all_in_order() {
    let queue = queue_of_two(FieldTable::default()).await;
    let (first, second) = (subscription(&queue), subscription(&queue));
    for body in ["1", "2"] {
        assert_eq!(first.receive().await.unwrap().message.payload, body);
    }
    let refused = second.receive().await.unwrap_err();
    assert!(std::error::Error::source(&refused).unwrap().to_string().contains("exclusive"), "{refused:?}");
    drop(first);
    let received = loop {
        if let Ok(received) = second.receive().await {
            break received;
        }
    };
    assert_eq!((received.message.payload.as_ref(), received.redelivered), (&b"1"[..], true));
    assert_eq!(second.receive().await.unwrap().message.payload, "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_with_a_single_active_consumer_is_consumed_from_as_it_is() {
    let mut arguments = FieldTable::default();
    arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
    let queue = queue_of_two(arguments).await;
    assert_eq!(subscription(&queue).receive().await.unwrap().message.payload, "1");
}
