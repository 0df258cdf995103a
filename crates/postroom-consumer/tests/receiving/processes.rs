//! Consumers as processes that are killed: between effect, commit and ack, and anywhere else.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use postroom::{Answer, Batch, Message, MessageId, Receipt, Sink, Subscription, Verdict};
use postroom_brokers::rabbitmq::{
    Binding, RabbitmqOptions, RabbitmqSink, RabbitmqSubscription, RabbitmqSubscriptionOptions,
};
use postroom_testkit::chance::Chance;
use postroom_testkit::conformance::subscription::one;
use postroom_testkit::postgres::Database;
use postroom_testkit::rabbitmq::AuditQueue;
use postroom_testkit::services::RabbitServer;
use postroom_testkit::surroundings;
use tokio_postgres::Client;

use crate::setup::{Running, as_told, assert_once, postgres, receiver_on, told, until};

const CHILD: &str = "POSTROOM_TEST_CONSUMER";
const PLACES: [&str; 5] = ["consume.effect", "consume.committed", "consume.charged", "consume.effect", "kill -9"];

/// Not a test: what the processes run that tests start and kill.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumer_process() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let [store, rabbitmq, queue] = told.split(' ').collect::<Vec<_>>()[..] else { panic!("{told}") };
    let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
        url: rabbitmq.to_owned(),
        queue: queue.to_owned(),
        bind: Vec::new(),
        prefetch: 400,
        unsettled_bytes_max: 64 << 20,
    })
    .unwrap();
    let running = Running::start(receiver_on(store, subscription, as_told()).concurrency(4));
    // Until it is killed, or whoever started it is gone.
    tokio::task::spawn_blocking(|| std::io::read_to_string(std::io::stdin())).await.unwrap().unwrap();
    running.stop().await;
}

struct Consumer(Child);

impl Consumer {
    fn start(database: &Database, queue: &str, place: Option<(&str, u64)>) -> Self {
        let told = format!("{} {} {queue}", database.url(), surroundings::rabbitmq_url());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::consumer_process", "--nocapture"]).env(CHILD, told);
        if let Some((place, times)) = place {
            command.env("POSTROOM_CRASH_AT", format!("{place}:{times}"));
        }
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn publish_all(sink: &RabbitmqSink, messages: &[Message]) {
    for part in messages.chunks(250) {
        let mut left: Vec<Message> = part.to_vec();
        while !left.is_empty() {
            let mut verdicts = sink.publish(&Batch::new(left.clone())).await.unwrap();
            let mut places = 0..;
            left.retain(|_| places.next().is_some_and(|place| verdicts.take(place) != Verdict::Stored));
        }
    }
}

async fn queue_and_sink() -> (AuditQueue, RabbitmqSink) {
    let mut options = RabbitmqOptions::new(surroundings::rabbitmq_url());
    options.exchange = format!("e-{}", surroundings::unique());
    let queue = AuditQueue::bound(&options.url, &options.exchange, "#").await;
    (queue, RabbitmqSink::new(options).unwrap())
}

async fn effects(client: &Client) -> i64 {
    client.query_one("select count(*) from effects", &[]).await.unwrap().get(0)
}

/// `POSTROOM_TEST_MESSAGES` sets how many; 10,000 unless it is given.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_killed_consumers_and_two_to_five_deliveries_leave_each_effect_once() {
    let count: usize = std::env::var("POSTROOM_TEST_MESSAGES").map_or(10_000, |messages| messages.parse().unwrap());
    let (database, (queue, sink)) = (postgres().await, queue_and_sink().await);
    let client = database.connect().await;
    let mut chance = Chance::new(61);
    let messages: Vec<Message> = (0..count).map(|n| told(&format!("k{}", n % 997), "order")).collect();
    let copies: Vec<u64> = messages.iter().map(|_| 2 + chance.below(4)).collect();
    let mut deliveries = 0;
    for pass in 0..5 {
        let mut part: Vec<Message> =
            messages.iter().zip(&copies).filter(|(_, copies)| **copies > pass).map(|(m, _)| m.clone()).collect();
        for n in (1..part.len()).rev() {
            part.swap(n, chance.below(n as u64 + 1) as usize);
        }
        publish_all(&sink, &part).await;
        deliveries += part.len();
    }
    assert!(deliveries >= 2 * count);
    let mut two = [None, Some(("consume.effect", 40))].map(|place| Consumer::start(&database, queue.name(), place));
    let mut deaths = 0;
    while effects(&client).await < count as i64 {
        let before = effects(&client).await;
        let target = (before + count as i64 / 12).min(count as i64);
        // Until some more is done, or the one that is to die has died.
        while effects(&client).await < target && two.iter_mut().all(Consumer::lives) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        deaths += 1;
        let place = PLACES[deaths % PLACES.len()];
        let place = (place != "kill -9").then_some((place, 1 + chance.below(30)));
        let dead = two.iter_mut().position(|consumer| !consumer.lives()).unwrap_or(deaths % 2);
        two[dead] = Consumer::start(&database, queue.name(), place);
    }
    until(&client, "select count(*) = 0 from postroom.inbox_messages where state not in ('done')").await;
    while queue.ready().await > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        for consumer in &mut two {
            if !consumer.lives() {
                *consumer = Consumer::start(&database, queue.name(), None);
            }
        }
    }
    assert_eq!(effects(&client).await, count as i64);
    assert_once(&client).await;
    let dead: i64 = client.query_one("select count(*) from postroom.dead_consume", &[]).await.unwrap().get(0);
    assert_eq!(dead, 0, "nobody is blamed for the death of others");
    println!("{count} messages, {deliveries} deliveries, {deaths} deaths");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_kills_its_consumer_every_time_is_dead_in_the_end_and_delays_only_its_key() {
    let (database, (queue, sink)) = (postgres().await, queue_and_sink().await);
    let client = database.connect().await;
    let doomed = told("a", "abort");
    let mut messages = vec![doomed.clone(), told("a", "after")];
    messages.extend((0..100).map(|n| told(&format!("k{n}"), "other")));
    publish_all(&sink, &messages).await;
    let mut consumer = Consumer::start(&database, queue.name(), None);
    let mut deaths = 0;
    let done = "select (select count(*) from done) = 101 and (select count(*) from postroom.dead_consume) = 1";
    while !client.query_one(done, &[]).await.unwrap().get::<_, bool>(0) {
        if !consumer.lives() {
            deaths += 1;
            assert!(deaths <= 7, "it kills for ever");
            consumer = Consumer::start(&database, queue.name(), None);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!((3..=7).contains(&deaths), "{deaths}");
    let row = client.query_one("select message_id, cause from postroom.dead_consume", &[]).await.unwrap();
    assert_eq!((MessageId::from(row.get::<_, uuid::Uuid>(0)), row.get::<_, &str>(1)), (doomed.id, "poison"));
    assert_once(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_consumer_and_a_closed_channel_are_recovered_from() {
    let (database, (_, sink)) = (postgres().await, queue_and_sink().await);
    let client = database.connect().await;
    let mut options = RabbitmqOptions::new(surroundings::rabbitmq_url());
    options.exchange = format!("e-{}", surroundings::unique());
    let queue = format!("q-{}", options.exchange);
    let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
        url: options.url.clone(),
        queue: queue.clone(),
        bind: vec![Binding::new(&options.exchange, "#")],
        prefetch: 10,
        unsettled_bytes_max: 64 << 20,
    })
    .unwrap();
    subscription.connect().await.unwrap();
    sink.close().await;
    let sink = RabbitmqSink::new(options.clone()).unwrap();
    let running = Running::start(receiver_on(database.url(), subscription, as_told()));
    publish_all(&sink, &[told("a", "1")]).await;
    until(&client, "select count(*) = 1 from done").await;
    // The broker cancels the consumer of a queue that is deleted; the subscription declares it anew.
    postroom_testkit::rabbitmq::delete_queue(&options.url, &queue).await;
    let again = told("a", "2");
    // Unroutable until the queue is there again.
    while sink.publish(&Batch::new(vec![again.clone()])).await.unwrap().take(0) != Verdict::Stored {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    until(&client, "select count(*) = 2 from done").await;
    running.stop().await;
    assert_once(&client).await;

    // An ack of a tag that nobody gave out makes the broker close the channel.
    let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
        url: options.url.clone(),
        queue: queue.clone(),
        bind: Vec::new(),
        prefetch: 10,
        unsettled_bytes_max: 64 << 20,
    })
    .unwrap();
    publish_all(&sink, &[told("a", "3"), told("a", "4")]).await;
    let first = one(&subscription).await.unwrap();
    let wrong = Receipt::new(first.receipt.session(), 4711);
    let _ = subscription.settle(&[(wrong, Answer::Ack)]).await;
    let running = Running::start(receiver_on(database.url(), subscription, as_told()));
    until(&client, "select count(*) = 4 from done").await;
    running.stop().await;
    assert_once(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_killed_under_a_receiver_loses_nothing() {
    const MESSAGES: usize = 2000;
    let mut broker = RabbitServer::start(&surroundings::scratch("receiver").join("rabbitmq")).unwrap();
    let database = postgres().await;
    let client = database.connect().await;
    let mut options = RabbitmqOptions::new(broker.url());
    options.exchange = "e".to_owned();
    let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
        url: broker.url(),
        queue: "q".to_owned(),
        bind: vec![Binding::new("e", "#")],
        prefetch: 200,
        unsettled_bytes_max: 64 << 20,
    })
    .unwrap();
    subscription.connect().await.unwrap();
    let messages: Vec<Message> = (0..MESSAGES).map(|n| told(&format!("k{}", n % 50), "order")).collect();
    let sink = RabbitmqSink::new(options).unwrap();
    publish_all(&sink, &messages).await;
    let running = Running::start(receiver_on(database.url(), subscription, as_told()).batch_max(5).concurrency(2));
    until(&client, "select count(*) > 300 from effects").await;
    broker.kill().unwrap();
    assert!(effects(&client).await < MESSAGES as i64, "it was killed in the middle");
    broker.start_again().unwrap();
    until(&client, &format!("select count(*) = {MESSAGES} from effects")).await;
    running.stop().await;
    assert_once(&client).await;
    broker.stop().unwrap();
}
