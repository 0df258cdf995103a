//! What readers of committed messages get of what is published in transactions.

#![cfg(feature = "kafka")]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use postroom::{Batch, FailureKind, Message, OperationId, Sink, Verdict, Way};
use postroom_brokers::SinkOptions;
use postroom_brokers::kafka::{KafkaOptions, KafkaTransactionsSink};
use postroom_testkit::kafka::AuditTopic;
use postroom_testkit::services::KafkaServer;
use postroom_testkit::surroundings;

/// A broker that was killed is there again long before.
const STORED_WITHIN: Duration = Duration::from_secs(120);

/// One broker for all tests that do not kill it. It ends with this process.
static SERVER: OnceLock<KafkaServer> = OnceLock::new();

async fn server() -> &'static KafkaServer {
    let started =
        || SERVER.get_or_init(|| KafkaServer::start(&surroundings::scratch("kafka-transactions"), 0).unwrap());
    tokio::task::spawn_blocking(started).await.unwrap()
}

/// Of one topic, which is there, as is the ledger.
async fn options(server: &KafkaServer, topic: &str) -> (KafkaOptions, AuditTopic) {
    let audit = AuditTopic::create(&server.address(), topic, 4, &[]).await;
    let ledger = format!("{topic}-ledger");
    AuditTopic::create(&server.address(), &ledger, 8, &[]).await;
    let mut options = KafkaOptions::new(format!("kafka://{}", server.address()));
    (options.transactional_id, options.ledger) = (Some(format!("{topic}-id")), Some(ledger));
    options.publish_deadline_seconds = 10;
    (options, audit)
}

fn sink(options: &KafkaOptions) -> KafkaTransactionsSink {
    KafkaTransactionsSink::new(options.clone()).unwrap()
}

fn of_lane(messages: &[Message], lane: impl Fn(usize) -> u16) -> Batch {
    Batch::of(messages.iter().enumerate().map(|(place, message)| {
        let way = Way { lane: lane(place), replay: None };
        (Arc::new(message.clone()), way)
    }))
}

async fn published(sink: &KafkaTransactionsSink, batch: &Batch) -> Vec<Verdict> {
    let mut verdicts = sink.publish(batch).await.unwrap();
    (0..batch.messages().len()).map(|place| verdicts.take(place)).collect()
}

/// As a relay does: what is unknown is published again.
async fn until_stored(sink: &KafkaTransactionsSink, batch: &Batch) {
    if let Err(problem) = stored_in_time(sink, batch).await {
        panic!("it is never stored: {problem}");
    }
}

/// What keeps it from being stored.
async fn stored_in_time(sink: &KafkaTransactionsSink, batch: &Batch) -> Result<(), String> {
    let (since, mut problem) = (Instant::now(), String::new());
    while since.elapsed() < STORED_WITHIN {
        match sink.publish(batch).await {
            Ok(mut verdicts) => {
                let verdicts: Vec<Verdict> = (0..batch.messages().len()).map(|place| verdicts.take(place)).collect();
                let failed = verdicts.iter().find(|verdict| matches!(verdict, Verdict::Failed(_)));
                assert!(failed.is_none(), "{failed:?}");
                let Some(left) = verdicts.iter().find(|verdict| **verdict != Verdict::Stored) else { return Ok(()) };
                problem = format!("{left:?}");
            }
            Err(error) => {
                problem = format!("{error:?}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    Err(problem)
}

fn orders(topic: &str, count: usize) -> Vec<Message> {
    (0..count).map(|n| Message::new(topic, "order.placed", n.to_string()).key(format!("key-{}", n % 7))).collect()
}

async fn ids(audit: &AuditTopic) -> Vec<String> {
    let mut ids: Vec<String> = audit.read().await.into_iter().map(|record| record.id).collect();
    ids.sort_unstable();
    ids
}

fn sorted(messages: &[Message]) -> Vec<String> {
    let mut ids: Vec<String> = messages.iter().map(|message| message.id.to_string()).collect();
    ids.sort_unstable();
    ids
}

#[tokio::test]
async fn what_another_relay_has_stored_is_not_stored_again() {
    let (options, audit) = options(server().await, "taken-over").await;
    let (one, two) = (sink(&options), sink(&options));
    let messages = orders("taken-over", 60);
    let lane = |place: usize| (place % 3) as u16;
    assert!(published(&one, &of_lane(&messages[..40], lane)).await.iter().all(|verdict| *verdict == Verdict::Stored));
    // The store never heard of it: the next relay publishes all of them, and more.
    assert!(published(&two, &of_lane(&messages, lane)).await.iter().all(|verdict| *verdict == Verdict::Stored));
    assert_eq!(ids(&audit).await, sorted(&messages));
    // The first one does not know that it is nobody any more.
    let late = orders("taken-over", 3);
    until_stored(
        &one,
        &of_lane(&[&messages[30..], &late[..]].concat(), |place| if place < 30 { lane(place + 30) } else { 0 }),
    )
    .await;
    until_stored(&two, &of_lane(&late, |_| 0)).await;
    assert_eq!(ids(&audit).await, sorted(&[&messages[..], &late[..]].concat()));
    // Also within one process, whose store did not record it.
    until_stored(&two, &of_lane(&late, |_| 0)).await;
    assert_eq!(ids(&audit).await.len(), 63);
    one.close().await;
    two.close().await;
}

/// The brokers refuse it in the middle of a transaction, or when it is to be committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_producer_sends_that_is_refused_meanwhile_is_not_taken_for_stored() {
    let (options, audit) = options(server().await, "refused").await;
    let mut before = Arc::new(sink(&options));
    let mut stored = Vec::new();
    for _ in 0..6 {
        let after = Arc::new(sink(&options));
        let publishing = tokio::spawn(async move {
            let mut stored = Vec::new();
            loop {
                let batch = of_lane(&orders("refused", 5), |_| 0);
                let Ok(mut verdicts) = before.publish(&batch).await else { return stored };
                let kept = (0..5)
                    .filter(|place| verdicts.take(*place) == Verdict::Stored)
                    .map(|place| batch.messages()[place].id);
                let known = stored.len();
                stored.extend(kept.map(|id| id.to_string()));
                if stored.len() < known + 5 {
                    return stored;
                }
            }
        });
        let first = orders("refused", 1);
        until_stored(&after, &of_lane(&first, |_| 0)).await;
        stored.extend(first.iter().map(|message| message.id.to_string()));
        stored.extend(publishing.await.unwrap());
        before = after;
    }
    stored.sort_unstable();
    let there = ids(&audit).await;
    let missing: Vec<&String> = stored.iter().filter(|id| there.binary_search(id).is_err()).collect();
    assert!(missing.is_empty(), "{} of {} that were taken for stored are not there", missing.len(), stored.len());
    assert!(there.windows(2).all(|pair| pair[0] != pair[1]), "twice");
}

#[tokio::test]
async fn a_call_that_is_dropped_stores_all_or_nothing_and_nothing_twice() {
    let (options, audit) = options(server().await, "dropped").await;
    let sink = sink(&options);
    let first = orders("dropped", 10);
    until_stored(&sink, &of_lane(&first, |_| 5)).await;
    let mut all = first;
    for round in 0..14_u64 {
        let messages = orders("dropped", 50);
        let batch = of_lane(&messages, |place| (place % 2) as u16 + 5);
        // At any moment of its transactions.
        let _ = tokio::time::timeout(Duration::from_micros(round * round * 100), sink.publish(&batch)).await;
        until_stored(&sink, &batch).await;
        all.extend(messages);
    }
    assert_eq!(ids(&audit).await, sorted(&all));
}

#[tokio::test]
async fn one_that_is_refused_takes_no_other_with_it_and_nothing_of_its_key_goes_first() {
    let server = server().await;
    let (mut options, _) = options(server, "refusing").await;
    let audit = AuditTopic::create(&server.address(), "small", 1, &[("max.message.bytes", "3000")]).await;
    options.topic = "{topic}".to_owned();
    let sink = sink(&options);
    let message = |topic: &str, key: &str, bytes: usize| Message::new(topic, "k", "x".repeat(bytes)).key(key);
    let messages = [
        message("small", "a", 5),
        message("small", "b", 9_000),
        message("small", "b", 5),
        message("missing", "c", 5),
        message("small", "c", 5),
        message("refusing-ledger", "d", 5),
        message("small", "e", 5),
    ];
    let verdicts = published(&sink, &of_lane(&messages, |_| 0)).await;
    let kind = |place: usize| match &verdicts[place] {
        Verdict::Failed(failure) => Some(failure.kind),
        _ => None,
    };
    assert_eq!((&verdicts[0], &verdicts[6]), (&Verdict::Stored, &Verdict::Stored), "{verdicts:?}");
    assert_eq!(kind(1), Some(FailureKind::Permanent), "{verdicts:?}");
    assert_eq!((kind(3), kind(5)), (Some(FailureKind::Transient), Some(FailureKind::Permanent)));
    for behind in [2, 4] {
        assert_eq!(verdicts[behind], Verdict::NotSent, "{verdicts:?}");
    }
    assert_eq!(ids(&audit).await, sorted(&[messages[0].clone(), messages[6].clone()]));
}

#[tokio::test]
async fn a_replay_is_stored_although_the_ledger_lists_the_message() {
    let (options, audit) = options(server().await, "replayed").await;
    let messages = orders("replayed", 5);
    until_stored(&sink(&options), &of_lane(&messages, |_| 1)).await;
    let next = sink(&options);
    let operation = OperationId::new();
    let again = Batch::of(messages.iter().map(|message| {
        let way = Way { lane: 1, replay: Some(operation) };
        (Arc::new(message.clone()), way)
    }));
    until_stored(&next, &again).await;
    assert_eq!(ids(&audit).await.len(), 10);
    // Once for each replay.
    until_stored(&sink(&options), &again).await;
    assert_eq!(ids(&audit).await.len(), 10);
}

#[tokio::test]
async fn what_one_topic_has_is_not_taken_for_stored_in_another() {
    let server = server().await;
    let (options, first) = options(server, "first").await;
    let second = AuditTopic::create(&server.address(), "second", 1, &[]).await;
    let messages = orders("first", 20);
    until_stored(&sink(&options), &of_lane(&messages, |_| 1)).await;
    // The same ids and the same ledger, as when a route is configured anew.
    let elsewhere = KafkaOptions { topic: "second".to_owned(), ..options.clone() };
    until_stored(&sink(&elsewhere), &of_lane(&messages, |_| 1)).await;
    until_stored(&sink(&options), &of_lane(&messages, |_| 1)).await;
    assert_eq!((ids(&first).await, ids(&second).await), (sorted(&messages), sorted(&messages)));
}

/// A lane keeps its partition of the ledger, so that partitions can be added.
#[tokio::test]
async fn a_ledger_may_get_more_partitions_and_must_have_one_for_each_lane() {
    let server = server().await;
    let (mut options, audit) = options(server, "grown").await;
    let ledger = AuditTopic::create(&server.address(), "small-ledger", 2, &[]).await;
    options.ledger = Some("small-ledger".to_owned());
    let messages = orders("grown", 20);
    until_stored(&sink(&options), &of_lane(&messages, |place| (place % 2) as u16)).await;
    let error = sink(&options).publish(&of_lane(&orders("grown", 1), |_| 2)).await.unwrap_err();
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert!(why.contains("has 2 partitions") && why.contains("--alter"), "{why}");
    ledger.partitions(5).await;
    until_stored(&sink(&options), &of_lane(&messages, |place| (place % 2) as u16)).await;
    assert_eq!(ids(&audit).await, sorted(&messages));
    AuditTopic::create(&server.address(), "compacted-ledger", 2, &[("cleanup.policy", "compact")]).await;
    options.ledger = Some("compacted-ledger".to_owned());
    let error = options.check().await.unwrap_err();
    assert!(error.problem.contains("is compacted") && error.advice.contains("cleanup.policy=delete"), "{error:?}");
}

#[tokio::test]
async fn what_is_missing_for_transactions_is_told() {
    let server = server().await;
    let (options, _) = options(server, "complete").await;
    let found = options.check().await.unwrap();
    assert!(
        found.contains("in transactions, with ledger \"complete-ledger\" of 8 partitions") || found.contains("topics"),
        "{found}"
    );
    let fixed = KafkaOptions { topic: "complete".to_owned(), ..options.clone() };
    let found = fixed.check().await.unwrap();
    assert!(found.contains("in transactions, with ledger \"complete-ledger\" of 8 partitions"), "{found}");
    let missing = KafkaOptions { ledger: Some("nowhere".to_owned()), ..fixed.clone() };
    let error = missing.check().await.unwrap_err();
    assert!(error.problem.contains("\"nowhere\"") && error.advice.contains("--partitions 16"), "{error:?}");
    let without = sink(&missing);
    let error = without.publish(&of_lane(&orders("complete", 1), |_| 0)).await.unwrap_err();
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert!(why.contains("the ledger, topic \"nowhere\", does not exist"), "{why}");
    assert!(without.probe().await.is_err());
    for (change, expected) in [
        (KafkaOptions { ledger: None, ..fixed.clone() }, "transactional_id needs a ledger"),
        (KafkaOptions { transactional_id: None, ..fixed.clone() }, "a ledger needs a transactional_id"),
        (KafkaOptions { ledger: Some("complete".to_owned()), ..fixed.clone() }, "a topic of its own"),
        (KafkaOptions { publish_deadline_seconds: 601, ..fixed.clone() }, "between 1 and 600"),
        (KafkaOptions { transactional_id: Some(String::new()), ..fixed.clone() }, "1 to 200 bytes"),
    ] {
        let error = change.open().err().unwrap();
        assert!(error.problem.contains(expected), "{error:?}");
    }
}

/// The broker is killed while transactions are on their way, and relays follow each other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn through_kills_of_the_broker_every_message_is_there_once_and_in_order() {
    const BATCHES: usize = 90;
    const EACH: usize = 40;
    let dir = surroundings::scratch("kafka-transactions-killed");
    let mut server = tokio::task::spawn_blocking(move || KafkaServer::start(&dir, 0).unwrap()).await.unwrap();
    let (mut options, audit) = options(&server, "orders").await;
    options.publish_deadline_seconds = 5;
    let mut relay = sink(&options);
    let mut expected = BTreeMap::<String, Vec<String>>::new();
    for number in 0..BATCHES {
        let messages: Vec<Message> =
            (0..EACH).map(|key| Message::new("orders", "k", "x").key(format!("key-{key}"))).collect();
        for message in &messages {
            expected.entry(message.key.clone().unwrap()).or_default().push(message.id.to_string());
        }
        let batch = of_lane(&messages, |place| (place % 4) as u16);
        if number % 30 == 15 {
            let (_, after) = tokio::join!(
                sink_for(&relay, &batch),
                tokio::task::spawn_blocking(move || {
                    server.kill().unwrap();
                    server.start_again().unwrap();
                    server
                })
            );
            server = after.unwrap();
        }
        if number % 20 == 10 {
            // It leaves whatever it has begun.
            let _ = tokio::time::timeout(Duration::from_millis(4), relay.publish(&batch)).await;
            relay = sink(&options);
        }
        if let Err(problem) = stored_in_time(&relay, &batch).await {
            // Version 4.3.1 does so now and then: its coordinator knows of no transaction, and its partitions have one that is open. It is told.
            assert!(problem.contains("find-hanging"), "it is never stored: {problem}");
            println!(
                "the broker has forgotten a transaction when it was killed; nothing more can be shown of this run"
            );
            return;
        }
    }
    let mut of_key = BTreeMap::<String, Vec<String>>::new();
    for record in audit.read().await {
        of_key.entry(String::from_utf8(record.key.unwrap()).unwrap()).or_default().push(record.id);
    }
    assert!(of_key == expected, "lost, twice, or out of order");
    relay.close().await;
}

async fn sink_for(sink: &KafkaTransactionsSink, batch: &Batch) {
    let _ = sink.publish(batch).await;
}
