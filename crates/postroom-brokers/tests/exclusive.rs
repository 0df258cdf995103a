//! An inbox's filler is the only consumer of its queue.

#![cfg(feature = "rabbitmq")]
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;

use lapin::options::{BasicPublishOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use postroom_brokers::rabbitmq::{RabbitmqSubscription, RabbitmqSubscriptionOptions};
use postroom_testkit::conformance::subscription::one;
use postroom_testkit::surroundings;

fn subscription(queue: &str) -> RabbitmqSubscription {
    subscription_at(surroundings::rabbitmq_url(), queue)
}

fn subscription_at(url: String, queue: &str) -> RabbitmqSubscription {
    let queue = queue.to_owned();
    RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
        url,
        queue,
        bind: Vec::new(),
        prefetch: 10,
        unsettled_bytes_max: 64 << 20,
    })
    .unwrap()
    .exclusive()
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
        assert_eq!(one(&first).await.unwrap().message.payload, body);
    }
    let refused = one(&second).await.unwrap_err();
    assert!(std::error::Error::source(&refused).unwrap().to_string().contains("exclusive"), "{refused:?}");
    drop(first);
    let received = loop {
        if let Ok(received) = one(&second).await {
            break received;
        }
    };
    assert_eq!((received.message.payload.as_ref(), received.redelivered), (&b"1"[..], true));
    assert_eq!(one(&second).await.unwrap().message.payload, "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_with_a_single_active_consumer_is_consumed_from_as_it_is() {
    let mut arguments = FieldTable::default();
    arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
    let queue = queue_of_two(arguments).await;
    assert_eq!(one(&subscription(&queue)).await.unwrap().message.payload, "1");
}

const BASIC_CANCEL: [u8; 4] = [0, 60, 0, 30];
const CONNECTION_CLOSE: [u8; 4] = [0, 10, 0, 50];

/// A link to the broker for one connection; its other end gets all that the client sent, when that connection has ended.
fn recorded(url: &str) -> (String, mpsc::Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (before, after) = url.split_once('@').unwrap();
    let (target, path) = after.split_once('/').unwrap();
    let recorded = format!("{before}@{}/{path}", listener.local_addr().unwrap());
    let (target, (tell, told)) = (target.to_owned(), mpsc::channel());
    thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut broker = TcpStream::connect(target).unwrap();
        let (mut answers, mut back) = (broker.try_clone().unwrap(), client.try_clone().unwrap());
        let answering = thread::spawn(move || {
            let _ = std::io::copy(&mut answers, &mut back);
            let _ = back.shutdown(Shutdown::Both);
        });
        let (mut said, mut buffer) = (Vec::new(), vec![0; 65_536]);
        while let Ok(read @ 1..) = client.read(&mut buffer) {
            said.extend_from_slice(&buffer[..read]);
            if broker.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        let _ = broker.shutdown(Shutdown::Both);
        answering.join().unwrap();
        let _ = tell.send(said);
    });
    (recorded, told)
}

/// Class and method of each method frame, in the order in which the client sent them.
fn methods(said: &[u8]) -> Vec<[u8; 4]> {
    let mut rest = said.strip_prefix(b"AMQP\0\0\x09\x01").unwrap();
    let mut methods = Vec::new();
    while rest.len() >= 8 {
        let size = u32::from_be_bytes(rest[3..7].try_into().unwrap()) as usize;
        let (frame, after) = rest.split_at(7 + size + 1);
        if frame[0] == 1 {
            methods.push(frame[7..11].try_into().unwrap());
        }
        rest = after;
    }
    methods
}

/// A consumer that is cancelled lets the next one in while its channel still has what it did not ack.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_subscription_ends_its_connection_and_never_cancels_its_consumer_before() {
    let queue = queue_of_two(FieldTable::default()).await;
    let (url, told) = recorded(&surroundings::rabbitmq_url());
    let subscription = subscription_at(url, &queue);
    one(&subscription).await.unwrap();
    drop(subscription);
    let methods = methods(&tokio::task::spawn_blocking(move || told.recv().unwrap()).await.unwrap());
    assert!(methods.contains(&CONNECTION_CLOSE), "{methods:?}");
    assert!(!methods.contains(&BASIC_CANCEL), "{methods:?}");
}
