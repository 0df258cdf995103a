//! Consumer groups of a real Kafka broker: partitions that come and go, brokers that die, messages that are removed.

#![cfg(feature = "kafka")]
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postroom::{Answer, Arrival, Batch, Bound, Message, Partition, Received, Sink, Subscription};
use postroom_brokers::SubscriptionOptions;
use postroom_brokers::kafka::{KafkaOptions, KafkaSink, KafkaSubscription, KafkaSubscriptionOptions};
use postroom_testkit::kafka::AuditTopic;
use postroom_testkit::services::KafkaServer;
use postroom_testkit::surroundings;
use tokio::task::JoinHandle;

const SOON: Duration = Duration::from_secs(60);

async fn server() -> KafkaServer {
    let start = || KafkaServer::start(&surroundings::scratch("kafka-groups"), 0).unwrap();
    tokio::task::spawn_blocking(start).await.unwrap()
}

fn subscription(server: &KafkaServer, topics: &[&str], prefetch: u16) -> Arc<KafkaSubscription> {
    let mut options = KafkaSubscriptionOptions::new(format!("kafka://{}", server.address()), topics, "billing");
    options.prefetch = prefetch;
    Arc::new(KafkaSubscription::new(options).unwrap())
}

async fn publish(server: &KafkaServer, messages: &[Message]) {
    let sink = KafkaSink::new(KafkaOptions::new(format!("kafka://{}", server.address()))).unwrap();
    for chunk in messages.chunks(500) {
        let mut verdicts = sink.publish(&Batch::new(chunk.iter().cloned())).await.unwrap();
        assert!((0..chunk.len()).all(|place| verdicts.take(place) == postroom::Verdict::Stored));
    }
    sink.close().await;
}

fn messages(topic: &str, count: usize, keys: usize) -> Vec<Message> {
    (0..count).map(|n| Message::new(topic, "n", n.to_string()).key(format!("k{}", n % keys))).collect()
}

async fn next(subscription: &KafkaSubscription, max: usize) -> Vec<Received> {
    let bound = Bound { messages: max, bytes: usize::MAX };
    match tokio::time::timeout(SOON, subscription.receive(bound)).await.expect("something arrives").unwrap() {
        Arrival::Messages(messages) => messages,
        Arrival::Revoked(partition) => panic!("{partition:?} was revoked"),
    }
}

async fn ack(subscription: &KafkaSubscription, received: &[Received]) {
    let answers: Vec<_> = received.iter().map(|received| (received.receipt, Answer::Ack)).collect();
    subscription.settle(&answers).await.unwrap();
}

fn number(received: &Received) -> usize {
    std::str::from_utf8(&received.message.payload).unwrap().parse().unwrap()
}

/// What members of a group applied: each message with who did it, in the order in which it was acked.
type Applied = Arc<Mutex<Vec<(usize, usize)>>>;

/// Receives and acks until it is stopped; on a revocation it drops what it has of the partition.
fn member(subscription: Arc<KafkaSubscription>, who: usize, applied: Applied) -> JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            match subscription.receive(Bound { messages: 20, bytes: usize::MAX }).await {
                Ok(Arrival::Messages(messages)) => {
                    for received in &messages {
                        applied.lock().unwrap().push((number(received), who));
                    }
                    let answers: Vec<_> = messages.iter().map(|received| (received.receipt, Answer::Ack)).collect();
                    let _ = subscription.settle(&answers).await;
                }
                Ok(Arrival::Revoked(_)) => {}
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    })
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let began = std::time::Instant::now();
    while !holds().await {
        assert!(began.elapsed() < 6 * SOON, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn distinct(applied: &Applied) -> usize {
    applied.lock().unwrap().iter().map(|(n, _)| *n).collect::<BTreeSet<_>>().len()
}

/// First occurrences of each key's messages are in their order.
fn assert_in_order(applied: &Applied, keys: usize) {
    let mut seen = BTreeSet::new();
    let mut newest: HashMap<usize, usize> = HashMap::new();
    for (n, who) in applied.lock().unwrap().iter() {
        if seen.insert(*n) {
            let before = newest.insert(n % keys, *n);
            assert!(before.is_none_or(|before| before < *n), "{n} after {before:?} by {who}: I4");
        }
    }
}

/// I1, I4: partitions go from member to member, and nothing is lost or out of order within a key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_that_come_and_go_share_the_partitions() {
    let server = server().await;
    AuditTopic::create(&server.address(), "shared", 6, &[]).await;
    let keys = 60;
    let mut messages = messages("shared", 60_000, keys);
    let applied = Applied::default();
    let one = subscription(&server, &["shared"], 50);
    one.connect().await.unwrap();
    let first = member(one.clone(), 1, applied.clone());
    let mut published = 0;
    let mut some = async |many: usize| {
        let rest = messages.split_off(many.min(messages.len()));
        published += messages.len();
        publish(&server, &std::mem::replace(&mut messages, rest)).await;
        published
    };
    some(2_000).await;
    until("the first has some", async || distinct(&applied) >= 1_000).await;
    let two = subscription(&server, &["shared"], 50);
    let second = member(two.clone(), 2, applied.clone());
    until("the second has some", async || {
        some(120).await;
        applied.lock().unwrap().iter().any(|(_, who)| *who == 2)
    })
    .await;
    // It leaves in the middle.
    some(2_000).await;
    second.abort();
    two.close().await;
    let all = some(1_000).await;
    until("all are applied", async || distinct(&applied) == all).await;
    first.abort();
    assert_in_order(&applied, keys);
    let repeated = applied.lock().unwrap().len() - all;
    assert!(repeated <= 4 * 50, "{repeated} came twice: no more than two members had in hand");
    one.close().await;
}

/// What is in hand when a partition goes is told, and cannot be settled any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_goes_is_told_and_its_deliveries_are_fenced() {
    let server = server().await;
    AuditTopic::create(&server.address(), "fenced", 2, &[]).await;
    let messages = messages("fenced", 40, 8);
    publish(&server, &messages).await;
    let one = subscription(&server, &["fenced"], 100);
    let mut held: Vec<Received> = Vec::new();
    while held.len() < 40 {
        held.extend(next(&one, 100).await);
    }
    let two = subscription(&server, &["fenced"], 100);
    let (receiving, heard) = (
        one.clone(),
        tokio::spawn({
            let two = two.clone();
            async move { next(&two, 100).await }
        }),
    );
    let bound = Bound { messages: 100, bytes: usize::MAX };
    let gone = tokio::time::timeout(SOON, receiving.receive(bound)).await.expect("a revocation").unwrap();
    let Arrival::Revoked(gone) = gone else { panic!("{gone:?}") };
    let (theirs, ours): (Vec<_>, Vec<_>) = held.into_iter().partition(|received| received.partition == gone);
    assert!(!theirs.is_empty() && !ours.is_empty());
    // Too late: it has no effect, and the other member has them.
    ack(&one, &theirs).await;
    let mut again = heard.await.unwrap();
    while again.len() < theirs.len() {
        again.extend(next(&two, 100).await);
    }
    let ids = |of: &[Received]| of.iter().map(|received| received.id).collect::<Vec<_>>();
    assert_eq!(ids(&again), ids(&theirs), "in their order, none is missing");
    assert!(again.iter().all(|received| received.redelivered));
    ack(&one, &ours).await;
    ack(&two, &again).await;
    one.close().await;
    two.close().await;
    let last = Message::new("fenced", "n", "40").key("k0");
    publish(&server, std::slice::from_ref(&last)).await;
    let three = subscription(&server, &["fenced"], 100);
    assert_eq!(next(&three, 100).await[0].id, Some(last.id), "all before it was settled");
}

/// I1: kill -9 of the broker while messages come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_killed_and_comes_back_loses_nothing_and_is_noticed() {
    let mut server = server().await;
    AuditTopic::create(&server.address(), "killed", 3, &[]).await;
    let (all, keys) = (3_000, 30);
    publish(&server, &messages("killed", all, keys)).await;
    let applied = Applied::default();
    let one = subscription(&server, &["killed"], 20);
    one.connect().await.unwrap();
    let receiving = member(one.clone(), 1, applied.clone());
    for part in 1..3 {
        until("some are applied", async || distinct(&applied) >= part * all / 4).await;
        tokio::task::block_in_place(|| server.kill().unwrap());
        until("it is noticed", async || !one.is_connected() || distinct(&applied) == all).await;
        tokio::task::block_in_place(|| server.start_again().unwrap());
        until("it is noticed that it is back", async || one.is_connected()).await;
    }
    until("all are applied", async || distinct(&applied) == all).await;
    receiving.abort();
    assert_in_order(&applied, keys);
    one.close().await;
}

/// Kafka removes messages whoever has read them: that is told as a loss, and the rest comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_removed_before_it_was_received_holds_up_nobody() {
    let server = server().await;
    let audit = AuditTopic::create(&server.address(), "removed", 1, &[]).await;
    let messages = messages("removed", 30, 3);
    publish(&server, &messages).await;
    let one = subscription(&server, &["removed"], 5);
    let received = next(&one, 5).await;
    ack(&one, &received).await;
    one.close().await;
    audit.remove_before(20).await;
    let two = subscription(&server, &["removed"], 100);
    let mut rest = Vec::new();
    while rest.len() < 10 {
        rest.extend(next(&two, 100).await);
    }
    assert_eq!(rest.iter().map(number).collect::<Vec<_>>(), (20..30).collect::<Vec<_>>());
    ack(&two, &rest).await;
    // While it is received, too.
    publish(&server, &messages).await;
    let more = next(&two, 1).await;
    assert_eq!(number(&more[0]), 0);
    two.close().await;
    // A topic that was made anew is received from its beginning.
    audit.delete().await;
    AuditTopic::create(&server.address(), "removed", 1, &[]).await;
    publish(&server, &messages[..3]).await;
    let three = subscription(&server, &["removed"], 100);
    let mut again = Vec::new();
    while again.len() < 3 {
        again.extend(next(&three, 100).await);
    }
    assert_eq!(again.iter().map(number).collect::<Vec<_>>(), [0, 1, 2]);
}

/// Several topics, more partitions later on, and messages of other programs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topics_that_grow_and_foreign_messages_are_received() {
    let server = server().await;
    let audit = AuditTopic::create(&server.address(), "one", 1, &[]).await;
    AuditTopic::create(&server.address(), "two", 2, &[]).await;
    let subscription = subscription(&server, &["one", "two"], 1000);
    subscription.connect().await.unwrap();
    publish(&server, &messages("one", 10, 5)).await;
    publish(&server, &messages("two", 10, 5)).await;
    let mut of_topic: BTreeMap<String, usize> = BTreeMap::new();
    let mut partitions: BTreeSet<Partition> = BTreeSet::new();
    while of_topic.values().sum::<usize>() < 20 {
        for received in next(&subscription, 100).await {
            *of_topic.entry(received.message.topic.clone()).or_default() += 1;
            partitions.insert(received.partition);
            ack(&subscription, &[received]).await;
        }
    }
    assert_eq!(of_topic, BTreeMap::from([("one".to_owned(), 10), ("two".to_owned(), 10)]));
    assert!(partitions.len() >= 2);
    audit.write(b"foreign", Some(b"key"), &[("x", b"\xff")]).await;
    let foreign = next(&subscription, 1).await.remove(0);
    assert_eq!((foreign.id, foreign.message.key.as_deref()), (None, Some("key")));
    assert_eq!((foreign.message.payload.as_ref(), foreign.message.topic.as_str()), (&b"foreign"[..], "one"));
    assert_eq!(foreign.message.headers.get("x").map(String::as_str), Some("\u{fffd}"));
    subscription.close().await;
}

#[tokio::test]
async fn what_is_wrong_is_told() {
    let server = server().await;
    AuditTopic::create(&server.address(), "there", 4, &[]).await;
    let url = format!("kafka://{}", server.address());
    let missing = subscription(&server, &["missing"], 10);
    let error = missing.connect().await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("topic \"missing\" does not exist") && source.contains("kafka-topics.sh"), "{source}");
    let options = KafkaSubscriptionOptions::new(&url, &["there"], "billing");
    let found = options.check(&[]).await.unwrap();
    assert!(found.contains("topic \"there\" has 4 partitions") && found.contains("no members"), "{found}");
    let error = KafkaSubscriptionOptions::new(&url, &["missing"], "billing").check(&[]).await.unwrap_err();
    assert!(error.problem.contains("does not exist") && error.advice.contains("--create"), "{error:?}");
    let joined = subscription(&server, &["there"], 10);
    joined.connect().await.unwrap();
    assert!(options.check(&[]).await.unwrap().contains("has 1 member"));
    for (options, told) in [
        (KafkaSubscriptionOptions::new(&url, &[], "g"), "at least one topic"),
        (KafkaSubscriptionOptions::new(&url, &["a b"], "g"), "can be no topic"),
        (KafkaSubscriptionOptions::new(&url, &["a"], ""), "group must have"),
        (KafkaSubscriptionOptions::new("amqp://x", &["a"], "g"), "must begin with kafka://"),
    ] {
        let error = KafkaSubscription::new(options).err().unwrap().to_string();
        assert!(error.contains(told), "{error}");
    }
    let away = KafkaSubscriptionOptions::new("kafka://127.0.0.1:1", &["a"], "g");
    let away = KafkaSubscription::new(away).unwrap();
    let error = tokio::time::timeout(SOON, away.receive(Bound { messages: 1, bytes: 1 })).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    assert!(!away.is_connected());
}

/// I1: reading would go on at the old place, past messages that nobody has received.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_was_made_anew_under_a_member_or_between_two_is_received_from_its_beginning() {
    let server = server().await;
    let topic = AuditTopic::create(&server.address(), "anew", 1, &[]).await;
    publish(&server, &messages("anew", 50, 5)).await;
    let one = subscription(&server, &["anew"], 1000);
    let applied = Applied::default();
    one.connect().await.unwrap();
    let receiving = member(one.clone(), 1, applied.clone());
    until("all are applied", async || distinct(&applied) == 50).await;
    let anew = |from: usize, count: usize| -> Vec<Message> {
        (from..from + count).map(|n| Message::new("anew", "n", n.to_string()).key(format!("k{}", n % 5))).collect()
    };
    topic.delete().await;
    let topic = AuditTopic::create(&server.address(), "anew", 1, &[]).await;
    publish(&server, &anew(1_000, 60)).await;
    until("all of the new one are applied", async || distinct(&applied) == 110).await;
    receiving.abort();
    one.close().await;
    // While nobody receives.
    topic.delete().await;
    AuditTopic::create(&server.address(), "anew", 1, &[]).await;
    publish(&server, &anew(2_000, 200)).await;
    let two = subscription(&server, &["anew"], 1000);
    let receiving = member(two.clone(), 2, applied.clone());
    until("all of the newest are applied", async || distinct(&applied) == 310).await;
    receiving.abort();
    two.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_belongs_to_one_consumer() {
    let server = server().await;
    AuditTopic::create(&server.address(), "owned", 2, &[]).await;
    let of = |consumer: &str| {
        let options = KafkaSubscriptionOptions::new(format!("kafka://{}", server.address()), &["owned"], "owned");
        KafkaSubscription::new(options.of_consumer(consumer)).unwrap()
    };
    let billing = of("billing");
    billing.connect().await.unwrap();
    let shipping = of("shipping");
    let error = tokio::time::timeout(SOON, shipping.connect()).await.unwrap().unwrap_err();
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert!(why.contains("group \"owned\" is that of consumer \"billing\""), "{why}");
    let messages = messages("owned", 20, 8);
    publish(&server, &messages).await;
    let mut seen = 0;
    while seen < 20 {
        let bound = Bound { messages: 100, bytes: usize::MAX };
        if let Ok(Arrival::Messages(received)) = tokio::time::timeout(SOON, billing.receive(bound)).await.unwrap() {
            seen += received.len();
        }
    }
    billing.close().await;
}

/// One that is missing is told, and the others are received.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_is_missing_keeps_nobody_from_the_others() {
    let server = server().await;
    let gone = AuditTopic::create(&server.address(), "goes", 1, &[]).await;
    AuditTopic::create(&server.address(), "stays", 1, &[]).await;
    let one = subscription(&server, &["goes", "stays", "comes"], 100);
    one.connect().await.unwrap();
    let bound = Bound { messages: 100, bytes: usize::MAX };
    let error = tokio::time::timeout(SOON, one.receive(bound)).await.unwrap().unwrap_err();
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert!(why.contains("topic \"comes\" does not exist"), "{why}");
    gone.delete().await;
    let mut seen = BTreeSet::new();
    for n in 0..5 {
        publish(&server, &[Message::new("stays", "n", n.to_string())]).await;
        while !seen.contains(&n) {
            if let Ok(Arrival::Messages(received)) = tokio::time::timeout(SOON, one.receive(bound)).await.unwrap() {
                seen.extend(received.iter().map(number));
                ack(&one, &received).await;
            }
        }
    }
    AuditTopic::create(&server.address(), "comes", 1, &[]).await;
    publish(&server, &[Message::new("comes", "n", "77")]).await;
    while !seen.contains(&77) {
        if let Ok(Arrival::Messages(received)) = tokio::time::timeout(SOON, one.receive(bound)).await.unwrap() {
            seen.extend(received.iter().map(number));
        }
    }
    one.close().await;
}

/// With less room than one partition can fill, each still has its turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_of_one_partition_does_not_keep_out_the_others() {
    let server = server().await;
    AuditTopic::create(&server.address(), "turns", 3, &[]).await;
    publish(&server, &messages("turns", 3_000, 60)).await;
    let one = subscription(&server, &["turns"], 20);
    let (mut partitions, mut count) = (BTreeMap::<Partition, usize>::new(), 0);
    while count < 900 {
        let received = next(&one, 20).await;
        count += received.len();
        received.iter().for_each(|received| *partitions.entry(received.partition).or_default() += 1);
        ack(&one, &received).await;
    }
    assert!(partitions.len() == 3 && partitions.values().all(|count| *count >= 100), "{partitions:?}");
    one.close().await;
}
