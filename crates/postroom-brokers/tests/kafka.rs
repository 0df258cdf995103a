//! What a real broker of Kafka does with what the sink sends, and what the sink makes of its answers.

#![cfg(feature = "kafka")]
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::time::Duration;

use postroom::{Batch, FailureKind, Message, Sink, Verdict};
use postroom_brokers::kafka::{KafkaOptions, KafkaSink};
use postroom_brokers::{CloudEvents, SinkOptions};
use postroom_testkit::authority::{Authority, Issued};
use postroom_testkit::kafka::AuditTopic;
use postroom_testkit::services::{KafkaSecurity, KafkaServer};
use postroom_testkit::surroundings;

/// One broker for all tests that do not kill it. It ends with this process.
static SERVER: OnceLock<KafkaServer> = OnceLock::new();

async fn server() -> &'static KafkaServer {
    let started = || SERVER.get_or_init(|| KafkaServer::start(&surroundings::scratch("kafka"), 1).unwrap());
    tokio::task::spawn_blocking(started).await.unwrap()
}

fn options(server: &KafkaServer) -> KafkaOptions {
    let mut options = KafkaOptions::new(format!("kafka://{}", server.address()));
    options.publish_deadline_seconds = 10;
    options
}

fn sink(server: &KafkaServer) -> KafkaSink {
    KafkaSink::new(options(server)).unwrap()
}

async fn published(sink: &KafkaSink, messages: &[Message]) -> Vec<Verdict> {
    let mut verdicts = sink.publish(&Batch::new(messages.iter().cloned())).await.unwrap();
    (0..messages.len()).map(|place| verdicts.take(place)).collect()
}

fn kind(verdict: &Verdict) -> Option<FailureKind> {
    match verdict {
        Verdict::Failed(failure) => Some(failure.kind),
        _ => None,
    }
}

fn reason(verdict: &Verdict) -> &str {
    match verdict {
        Verdict::Failed(failure) => &failure.reason,
        Verdict::Unknown(reason) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn messages_of_a_key_are_in_one_partition_in_order_with_what_they_are() {
    let server = server().await;
    let audit = AuditTopic::create(&server.address(), "keys", 8, &[]).await;
    let sink = sink(server);
    let messages: Vec<Message> = (0..400)
        .map(|n| {
            let message = Message::new("keys", "order.placed", n.to_string()).header("n ä", "v: \n");
            message.key(format!("key-{}", n % 40)).tenant("t").content_type("text/plain")
        })
        .collect();
    assert!(published(&sink, &messages).await.iter().all(|verdict| *verdict == Verdict::Stored));
    let stored = audit.read().await;
    assert_eq!(stored.len(), messages.len());
    let mut of_key = BTreeMap::<Vec<u8>, (i32, Vec<String>)>::new();
    for record in &stored {
        let (partition, ids) = of_key.entry(record.key.clone().unwrap()).or_insert((record.partition, Vec::new()));
        assert_eq!(*partition, record.partition, "a key is in one partition");
        ids.push(record.id.clone());
    }
    assert!(of_key.values().map(|(partition, _)| partition).collect::<BTreeSet<_>>().len() > 4, "keys are spread");
    for n in 0..40 {
        let (_, ids) = &of_key[format!("key-{n}").as_bytes()];
        let expected: Vec<String> = messages.iter().skip(n).step_by(40).map(|message| message.id.to_string()).collect();
        assert_eq!(*ids, expected);
    }
    // Where Kafka's own clients put them: org.apache.kafka.common.utils.Utils.murmur2 gives -973932308 for "21" and -790332482 for "foobar".
    let known = ["21", "foobar"].map(|key| Message::new("keys", "k", "x").key(key));
    assert!(published(&sink, &known).await.iter().all(|verdict| *verdict == Verdict::Stored));
    let now = audit.read().await;
    let at = known.map(|message| now.iter().find(|record| record.id == message.id.to_string()).unwrap().partition);
    assert_eq!(at, [4, 6]);
    let first = stored.iter().find(|record| record.id == messages[7].id.to_string()).unwrap();
    assert_eq!(first.payload.as_deref(), Some(b"7".as_slice()));
    let header = |name: &str| first.header(name);
    assert_eq!(header("postroom-type").as_deref(), Some("order.placed"));
    assert_eq!(header("content-type").as_deref(), Some("text/plain"));
    assert_eq!((header("tenant-id").as_deref(), header("n ä").as_deref()), (Some("t"), Some("v: \n")));
    sink.close().await;
}

#[tokio::test]
async fn an_event_is_one_of_cloudevents() {
    let server = server().await;
    let audit = AuditTopic::create(&server.address(), "events", 1, &[]).await;
    for mode in [CloudEvents::Binary, CloudEvents::Structured] {
        let mut options = options(server);
        (options.cloudevents, options.source) = (Some(mode), Some("/shop".to_owned()));
        let message = Message::new("events", "order.placed", r#"{"n":1}"#).key("k").content_type("application/json");
        let sink = KafkaSink::new(options).unwrap();
        assert_eq!(published(&sink, std::slice::from_ref(&message)).await, [Verdict::Stored]);
        let record = audit.read().await.pop().unwrap();
        let header = |name: &str| record.header(name);
        assert_eq!((record.key.as_deref(), &record.id), (Some(b"k".as_slice()), &message.id.to_string()));
        let payload = record.payload.as_deref().unwrap();
        if mode == CloudEvents::Binary {
            assert_eq!(
                (header("ce_id").as_deref(), header("ce_source").as_deref()),
                (Some(message.id.to_string().as_str()), Some("/shop"))
            );
            assert_eq!((header("content-type").as_deref(), payload), (Some("application/json"), &message.payload[..]));
        } else {
            let event: serde_json::Value = serde_json::from_slice(payload).unwrap();
            assert_eq!((&event["type"], &event["data"]["n"]), (&"order.placed".into(), &1.into()));
            assert!(header("content-type").unwrap().starts_with("application/cloudevents+json"));
        }
        sink.close().await;
    }
}

#[tokio::test]
async fn a_message_that_is_too_large_is_told_with_the_limit_and_kills_no_neighbour() {
    let server = server().await;
    let audit = AuditTopic::create(&server.address(), "small", 1, &[("max.message.bytes", "2000")]).await;
    // Many small requests, of which each takes its time on a busy machine.
    let sink = KafkaSink::new(KafkaOptions { publish_deadline_seconds: 60, ..options(server) }).unwrap();
    let small = || Message::new("small", "k", "x").key("a");
    let large = Message::new("small", "k", "x".repeat(5_000)).key("b");
    let batch = [small(), large.clone(), small()];
    let verdicts = published(&sink, &batch).await;
    assert_eq!((&verdicts[0], &verdicts[2]), (&Verdict::Stored, &Verdict::Stored));
    assert_eq!(kind(&verdicts[1]), Some(FailureKind::Permanent), "{verdicts:?}");
    let alone = published(&sink, std::slice::from_ref(&large)).await.remove(0);
    assert_eq!(kind(&alone), Some(FailureKind::Permanent));
    assert!(reason(&alone).contains("max.message.bytes"), "{alone:?}");
    assert_eq!(published(&sink, &[small()]).await, [Verdict::Stored]);
    let ids: Vec<String> = audit.read().await.into_iter().map(|record| record.id).collect();
    assert_eq!(ids[..2], [batch[0].id.to_string(), batch[2].id.to_string()]);
    assert_eq!(ids.len(), 3, "the large one is not there, and no other one twice");
    // Many that are together too large for the topic, and alone are not.
    let many: Vec<Message> =
        (0..300).map(|n| Message::new("small", "k", "x".repeat(500)).key(format!("key-{}", n % 7))).collect();
    let verdicts = published(&sink, &many).await;
    assert!(verdicts.iter().all(|verdict| *verdict == Verdict::Stored), "{verdicts:?}");
    let stored: Vec<String> = audit.read().await.into_iter().skip(3).map(|record| record.id).collect();
    let expected: Vec<String> = many.iter().map(|message| message.id.to_string()).collect();
    assert_eq!(stored, expected);
}

/// The client puts messages of several calls into one request.
#[tokio::test]
async fn a_message_is_not_judged_by_what_another_call_sends() {
    let server = server().await;
    let audit = AuditTopic::create(&server.address(), "shared", 1, &[("max.message.bytes", "2000")]).await;
    let sink = sink(server);
    let mut expected = Vec::new();
    for _ in 0..30 {
        let (small, large) = ([Message::new("shared", "k", "x")], [Message::new("shared", "k", "x".repeat(5_000))]);
        expected.push(small[0].id.to_string());
        let (with_large, with_small) = tokio::join!(published(&sink, &large), published(&sink, &small));
        assert_eq!(with_small, [Verdict::Stored]);
        assert_eq!(kind(&with_large[0]), Some(FailureKind::Permanent), "{with_large:?}");
    }
    assert_eq!(audit.read().await.into_iter().map(|record| record.id).collect::<Vec<_>>(), expected);
}

#[tokio::test]
async fn a_compacted_topic_takes_no_message_without_a_key() {
    let server = server().await;
    AuditTopic::create(&server.address(), "compacted", 1, &[("cleanup.policy", "compact")]).await;
    let sink = sink(server);
    let alone = published(&sink, &[Message::new("compacted", "k", "x")]).await.remove(0);
    assert_eq!(kind(&alone), Some(FailureKind::Permanent));
    assert!(reason(&alone).contains("without a key"), "{alone:?}");
    assert_eq!(published(&sink, &[Message::new("compacted", "k", "x").key("a")]).await, [Verdict::Stored]);
}

#[tokio::test]
async fn a_topic_that_is_missing_is_told_and_not_created() {
    let server = server().await;
    let audit = AuditTopic::create(&server.address(), "there", 1, &[]).await;
    let sink = sink(server);
    let batch =
        [Message::new("there", "k", "x"), Message::new("missing", "k", "x"), Message::new("no topic", "k", "x")];
    for _ in 0..2 {
        let verdicts = published(&sink, &batch).await;
        assert_eq!(verdicts[0], Verdict::Stored);
        assert_eq!(
            (kind(&verdicts[1]), kind(&verdicts[2])),
            (Some(FailureKind::Transient), Some(FailureKind::Permanent))
        );
        assert!(reason(&verdicts[1]).contains("kafka-topics.sh --create --topic missing"), "{verdicts:?}");
        assert!(reason(&verdicts[2]).contains("can be no topic"), "{verdicts:?}");
    }
    // This broker creates topics automatically when a client allows it.
    let options = KafkaOptions { topic: "missing".to_owned(), ..options(server) };
    let error = options.check().await.unwrap_err();
    assert!(
        error.problem.contains("\"missing\" does not exist") && error.advice.contains("kafka-topics.sh"),
        "{error:?}"
    );
    assert!(KafkaSink::new(options).unwrap().probe().await.is_err());
    // It comes when it is there.
    let late = AuditTopic::create(&server.address(), "missing", 1, &[]).await;
    assert_eq!(published(&sink, &batch[1..2]).await, [Verdict::Stored]);
    assert_eq!((audit.read().await.len(), late.read().await.len()), (2, 1));
}

#[tokio::test]
async fn a_topic_that_was_deleted_or_grew_is_noticed() {
    let server = server().await;
    let audit = AuditTopic::create(&server.address(), "grows", 1, &[]).await;
    let sink = KafkaSink::new(KafkaOptions { topic: "grows".to_owned(), ..options(server) }).unwrap();
    let message = |n: i32| Message::new("x", "k", "x").key(n.to_string());
    assert_eq!(published(&sink, &[message(0)]).await, [Verdict::Stored]);
    audit.partitions(6).await;
    sink.probe().await.unwrap();
    let many: Vec<Message> = (0..100).map(message).collect();
    // The client learns of new partitions a moment later; none of them is lost meanwhile.
    for _ in 0..50 {
        assert!(published(&sink, &many).await.iter().all(|verdict| *verdict == Verdict::Stored));
        if audit.read().await.iter().map(|record| record.partition).collect::<BTreeSet<_>>().len() > 1 {
            break;
        }
    }
    audit.delete().await;
    let mut verdict = Verdict::Stored;
    for n in 0..200 {
        let gone = sink.publish(&Batch::new([message(n)])).await;
        verdict = gone.map_or_else(|error| Verdict::Unknown(error.to_string()), |mut verdicts| verdicts.take(0));
        if verdict != Verdict::Stored {
            break;
        }
    }
    assert_ne!(verdict, Verdict::Stored, "the topic is gone");
}

#[tokio::test]
async fn what_is_wrong_with_a_topic_or_a_broker_is_told() {
    let server = server().await;
    let settings = [("cleanup.policy", "compact"), ("unclean.leader.election.enable", "true")];
    AuditTopic::create(&server.address(), "hazardous", 3, &settings).await;
    AuditTopic::create(&server.address(), "plain", 3, &[]).await;
    let of = |topic: &str| KafkaOptions { topic: topic.to_owned(), ..options(server) };
    let found = of("hazardous").check().await.unwrap();
    assert!(found.contains("3 partitions with 1 replica; 1 broker, the connection is not encrypted"), "{found}");
    let problems = async |topic: &str| -> Vec<String> {
        of(topic).hazards().await.unwrap().into_iter().map(|hazard| hazard.problem).collect()
    };
    let hazards = problems("hazardous").await;
    for problem in ["one replica", "compacted", "unclean.leader.election.enable"] {
        assert!(hazards.iter().any(|hazard| hazard.contains(problem)), "{problem}: {hazards:?}");
    }
    assert_eq!(problems("plain").await.len(), 1, "one replica");
    assert!(problems("{topic}").await.len() >= 4, "those that it may be about");
    assert!(problems("nowhere-{topic}").await.is_empty());
    // A listener that tells its clients to come by another address, where nobody listens.
    let (advertised, listens) = server.link(0);
    let mut elsewhere = KafkaOptions { topic: "plain".to_owned(), ..KafkaOptions::new(format!("kafka://{listens}")) };
    elsewhere.publish_deadline_seconds = 2;
    let error = elsewhere.check().await.unwrap_err();
    assert!(error.problem.contains(&format!("calls itself {advertised}")), "{error:?}");
    assert!(error.problem.contains("Connection refused") && error.advice.contains("advertised.listeners"), "{error:?}");
    let sink = KafkaSink::new(elsewhere).unwrap();
    let error = sink.publish(&Batch::new([Message::new("x", "k", "x")])).await.unwrap_err();
    let why = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(why.contains(&advertised), "{error}: {why}");
    for topic in ["", "{topic}-ü", "a b", "{topic}/x"] {
        let options = KafkaOptions { topic: topic.to_owned(), ..options(server) };
        assert!(options.check().await.is_err() && KafkaSink::new(options).is_err(), "{topic}");
    }
    let mut away = KafkaOptions::new("kafka://127.0.0.1:1");
    away.publish_deadline_seconds = 2;
    let error = away.check().await.unwrap_err();
    assert!(error.problem.contains("127.0.0.1:1") && error.advice.contains("start the broker"), "{error:?}");
    let sink = KafkaSink::new(away).unwrap();
    assert!(sink.publish(&Batch::new([Message::new("x", "k", "x")])).await.is_err());
    assert!(sink.probe().await.is_err() && sink.disconnected().is_some());
    let mut encrypted = KafkaOptions::new(format!("kafkas://{}", server.address()));
    encrypted.publish_deadline_seconds = 2;
    let error = encrypted.check().await.unwrap_err();
    assert!(error.advice.contains("kafkas:// where the broker's listener has TLS"), "{error:?}");
}

/// As a relay does, in order: what is unknown is published again before anything newer of its key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_killed_loses_nothing_that_it_confirmed() {
    const BATCHES: usize = 120;
    const EACH: usize = 50;
    let dir = surroundings::scratch("kafka-killed");
    let mut server = tokio::task::spawn_blocking(move || KafkaServer::start(&dir, 0).unwrap()).await.unwrap();
    let audit = AuditTopic::create(&server.address(), "orders", 4, &[]).await;
    let sink = KafkaSink::new(KafkaOptions { publish_deadline_seconds: 3, ..options(&server) }).unwrap();
    let mut sent = Vec::new();
    for number in 0..BATCHES {
        // One message of each key in a batch.
        let batch: Vec<Message> =
            (0..EACH).map(|key| Message::new("orders", "k", "x").key(format!("key-{key}"))).collect();
        sent.extend(batch.iter().map(|message| (message.key.clone().unwrap(), message.id.to_string())));
        let mut left = batch;
        let mut killed = None;
        if number % 40 == 20 {
            // While it is on its way.
            server = tokio::task::spawn_blocking(move || {
                server.kill().unwrap();
                server
            })
            .await
            .unwrap();
            killed = Some(());
        }
        while !left.is_empty() {
            let verdicts = match sink.publish(&Batch::new(left.iter().cloned())).await {
                Ok(mut verdicts) => (0..left.len()).map(|place| verdicts.take(place)).collect(),
                Err(_) => left.iter().map(|_| Verdict::Unknown(String::new())).collect::<Vec<_>>(),
            };
            let kept = left.into_iter().zip(verdicts).filter(|(_, verdict)| *verdict != Verdict::Stored);
            left = kept
                .map(|(message, verdict)| {
                    assert!(
                        !matches!(verdict, Verdict::Failed(ref failure) if failure.kind != FailureKind::Busy),
                        "{verdict:?}"
                    );
                    message
                })
                .collect();
            if killed.take().is_some() {
                server = tokio::task::spawn_blocking(move || {
                    server.start_again().unwrap();
                    server
                })
                .await
                .unwrap();
            }
        }
    }
    let mut of_key = BTreeMap::<String, Vec<String>>::new();
    for record in audit.read().await {
        let key = String::from_utf8(record.key.unwrap()).unwrap();
        let ids = of_key.entry(key).or_default();
        // What is repeated was unknown, and comes before anything newer.
        if ids.last() != Some(&record.id) {
            ids.push(record.id);
        }
    }
    let mut expected = BTreeMap::<String, Vec<String>>::new();
    for (key, id) in sent {
        expected.entry(key).or_default().push(id);
    }
    assert!(of_key == expected, "lost, or out of order");
    tokio::time::timeout(Duration::from_secs(20), sink.close()).await.unwrap();
}

/// A certificate and its key in one file, as a broker reads them.
fn key_store(issued: &Issued) -> String {
    let file = issued.key.with_extension("store.pem");
    let read = |path| std::fs::read_to_string(path).unwrap();
    std::fs::write(&file, read(&issued.key) + &read(&issued.certificate)).unwrap();
    file.display().to_string()
}

#[tokio::test]
async fn certificates_users_and_rights_are_checked_on_both_sides() {
    let folder = surroundings::scratch("authority");
    let ca = Authority::create(&folder, "relay");
    let root = ca.root.display().to_string();
    let lines = format!(
        "ssl.keystore.type=PEM\nssl.keystore.location={}\nssl.truststore.type=PEM\nssl.truststore.location={root}\n\
         listener.name.elsewhere.ssl.keystore.type=PEM\nlistener.name.elsewhere.ssl.keystore.location={}\n\
         listener.name.mutual.ssl.client.auth=required\nsasl.enabled.mechanisms=PLAIN,SCRAM-SHA-512\n\
         listener.name.users.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
         user_admin=\"p@ss:1\" user_nobody=\"p@ss:2\";\n\
         listener.name.users.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;",
        key_store(&ca.server),
        key_store(&ca.elsewhere)
    );
    let dir = surroundings::scratch("kafka-secure");
    let started = move || {
        let listeners = [("USERS", "SASL_SSL"), ("ELSEWHERE", "SSL"), ("MUTUAL", "SSL")];
        let users = [("admin", "p@ss:1"), ("nobody", "p@ss:2")];
        KafkaServer::start_secure(&dir, KafkaSecurity { listeners: &listeners, lines: &lines, users: &users }).unwrap()
    };
    let server = tokio::task::spawn_blocking(started).await.unwrap();
    AuditTopic::create(&server.address(), "orders", 1, &[]).await;
    let of = |user: &str, listener: &str, query: &str| {
        let mut options = KafkaOptions::new(format!("kafkas://{user}{}?{query}", server.listener(listener)));
        (options.publish_deadline_seconds, options.topic) = (3, "orders".to_owned());
        options
    };
    let message = || Batch::new([Message::new("orders", "k", "x")]);
    let trusted = format!("cacertfile={root}");
    let client = format!("{trusted}&certfile={}&keyfile={}", ca.client.certificate.display(), ca.client.key.display());
    for mechanism in ["PLAIN", "SCRAM-SHA-512"] {
        let options = of("admin:p%40ss%3a1@", "USERS", &format!("{trusted}&mechanism={mechanism}"));
        let found = options.check().await.unwrap();
        assert!(found.contains("encrypted with TLS"), "{found}");
        let sink = KafkaSink::new(options).unwrap();
        assert_eq!(sink.publish(&message()).await.unwrap().take(0), Verdict::Stored, "{mechanism}");
    }
    for (options, problem, advice) in [
        (of("admin:wrong@", "USERS", &trusted), "uthentication", "correct the user"),
        (of("admin:p%40ss%3a1@", "USERS", ""), "certificate verify failed", "cacertfile"),
        (of("", "ELSEWHERE", &trusted), "certificate verify failed", "cacertfile"),
        (of("", "MUTUAL", &trusted), "", ""),
    ] {
        let error = options.check().await.unwrap_err();
        assert!(error.problem.contains(problem) && error.advice.contains(advice), "{error:?}");
        assert!(!error.to_string().contains("wrong"));
        assert!(KafkaSink::new(options).unwrap().publish(&message()).await.is_err(), "{problem}");
    }
    // The owner of the client certificate has no rights either: what the broker says shows that it knows who it is.
    for options in [of("", "MUTUAL", &client), of("nobody:p%40ss%3a2@", "USERS", &trusted)] {
        let sink = KafkaSink::new(options).unwrap();
        let verdict = sink.publish(&message()).await.unwrap().take(0);
        assert_eq!(kind(&verdict), Some(FailureKind::Transient), "{verdict:?}");
        assert!(reason(&verdict).contains("may not write to topic \"orders\""), "{verdict:?}");
    }
}

#[tokio::test]
async fn replicas_that_are_away_hold_up_what_they_must_confirm_and_lose_nothing() {
    let (one, two) = (surroundings::scratch("kafka-one"), surroundings::scratch("kafka-two"));
    let started = move || {
        let first = KafkaServer::start(&one, 0).unwrap();
        let second = first.join(&two, 2).unwrap();
        (first, second)
    };
    let (first, mut second) = tokio::task::spawn_blocking(started).await.unwrap();
    let careful = [("min.insync.replicas", "2")];
    let careful = AuditTopic::replicated(&first.address(), "careful", (4, 2), &careful).await;
    let hasty = AuditTopic::replicated(&first.address(), "hasty", (4, 2), &[]).await;
    let of = |topic: &str| {
        let mut options = KafkaOptions::new(format!("kafka://{},{}", first.address(), second.address()));
        (options.publish_deadline_seconds, options.topic) = (4, topic.to_owned());
        options
    };
    let hazards = async |topic: &str| of(topic).hazards().await.unwrap();
    assert_eq!(hazards("careful").await, []);
    let found = hazards("hasty").await;
    assert!(found.len() == 1 && found[0].problem.contains("min.insync.replicas = 1"), "{found:?}");
    let (of_careful, of_hasty) = (KafkaSink::new(of("careful")).unwrap(), KafkaSink::new(of("hasty")).unwrap());
    let messages =
        |count: i32| -> Vec<Message> { (0..count).map(|n| Message::new("x", "k", "x").key(n.to_string())).collect() };
    let before = messages(40);
    assert!(published(&of_careful, &before).await.iter().all(|verdict| *verdict == Verdict::Stored));
    // Partitions that the second one led go to the first, which is enough for one of the topics.
    second = tokio::task::spawn_blocking(move || {
        second.kill().unwrap();
        second
    })
    .await
    .unwrap();
    let batch = messages(40);
    let mut left = batch.clone();
    for _ in 0..20 {
        if left.is_empty() {
            break;
        }
        let verdicts = match of_hasty.publish(&Batch::new(left.iter().cloned())).await {
            Ok(mut verdicts) => (0..left.len()).map(|place| verdicts.take(place)).collect(),
            Err(_) => vec![Verdict::Unknown(String::new()); left.len()],
        };
        left = left
            .into_iter()
            .zip(verdicts)
            .filter(|(_, verdict)| *verdict != Verdict::Stored)
            .map(|(one, _)| one)
            .collect();
    }
    assert!(left.is_empty(), "one replica is enough there");
    let stored: BTreeSet<String> = hasty.read().await.into_iter().map(|record| record.id).collect();
    assert!(batch.iter().all(|message| stored.contains(&message.id.to_string())));
    // And not for the other.
    let waiting = messages(10);
    for _ in 0..2 {
        match of_careful.publish(&Batch::new(waiting.iter().cloned())).await {
            Ok(mut verdicts) => {
                for place in 0..waiting.len() {
                    let verdict = verdicts.take(place);
                    let waits = matches!(verdict, Verdict::Unknown(_)) || kind(&verdict) == Some(FailureKind::Busy);
                    assert!(waits, "nothing is used up: {verdict:?}");
                }
            }
            Err(error) => println!("{error}: {:?}", std::error::Error::source(&error).map(ToString::to_string)),
        }
    }
    second = tokio::task::spawn_blocking(move || {
        second.start_again().unwrap();
        second
    })
    .await
    .unwrap();
    for _ in 0..20 {
        let again = of_careful.publish(&Batch::new(waiting.iter().cloned())).await;
        if again.is_ok_and(|mut verdicts| (0..waiting.len()).all(|place| verdicts.take(place) == Verdict::Stored)) {
            break;
        }
    }
    let stored: BTreeSet<String> = careful.read().await.into_iter().map(|record| record.id).collect();
    assert!(before.iter().chain(&waiting).all(|message| stored.contains(&message.id.to_string())));
    drop(second);
}
