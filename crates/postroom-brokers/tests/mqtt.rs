//! What a real broker of MQTT does with what the sink sends, and what the sink makes of its answers.

#![cfg(feature = "mqtt")]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::Duration;

use postroom::{Arrival, Batch, Bound, FailureKind, Message, Sink, Subscription, Verdict};
use postroom_brokers::mqtt::{MqttOptions, MqttSink, MqttSubscription, MqttSubscriptionOptions, Unheard};
use postroom_brokers::{CloudEvents, SinkOptions, SubscriptionOptions};
use postroom_testkit::authority::Authority;
use postroom_testkit::mqtt::AuditSession;
use postroom_testkit::services::MosquittoServer;
use postroom_testkit::surroundings;

fn server(further: &str) -> MosquittoServer {
    MosquittoServer::start(&surroundings::scratch("mqtt"), further).unwrap()
}

fn options(server: &MosquittoServer) -> MqttOptions {
    let mut options = MqttOptions::new(server.url(), "shop/{topic}");
    options.publish_deadline_seconds = 10;
    options
}

async fn published(options: &MqttOptions, messages: &[Message]) -> Vec<Verdict> {
    let sink = MqttSink::new(options.clone()).unwrap();
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

#[tokio::test]
async fn a_message_that_nobody_subscribes_to_is_not_stored() {
    let server = server("");
    let verdicts = published(&options(&server), &[message()]).await;
    let (kind, reason) = failed(&verdicts[0]);
    assert_eq!(kind, FailureKind::Transient);
    assert!(reason.contains("shop/orders") && reason.contains("nobody subscribes"), "{reason}");
    let skipping = MqttOptions { unheard: Unheard::Skip, ..options(&server) };
    assert_eq!(published(&skipping, &[message()]).await, [Verdict::Skipped]);
    // Who subscribes later gets a retained one.
    let retaining = MqttOptions { retain: true, ..options(&server) };
    let kept = message();
    assert_eq!(published(&retaining, std::slice::from_ref(&kept)).await, [Verdict::Stored]);
    let audit = AuditSession::begin(&server.address(), "audit", "#").await;
    let heard: Vec<String> = audit.heard().await.into_iter().map(|heard| heard.id).collect();
    assert_eq!(heard, [kept.id.to_string()]);
    assert_eq!(published(&options(&server), &[message()]).await, [Verdict::Stored]);
}

#[tokio::test]
async fn a_message_carries_what_it_is_and_one_that_is_too_large_names_the_limit() {
    let server = server("max_packet_size 3000");
    let audit = AuditSession::begin(&server.address(), "audit", "#").await;
    let small = message().tenant("t").content_type("text/plain").header("n ä", "v:");
    let large = Message::new("orders", "k", "x".repeat(3_000));
    // The broker would end the connection.
    let control = message().header("n", "a\n");
    let batch = [small.clone(), large, Message::new("a#b", "k", "x"), control, message()];
    let verdicts = published(&options(&server), &batch).await;
    assert_eq!((&verdicts[0], &verdicts[4]), (&Verdict::Stored, &Verdict::Stored));
    assert!(failed(&verdicts[3]).1.contains("end the connection"));
    let (kind, reason) = failed(&verdicts[1]);
    assert!(kind == FailureKind::Permanent && reason.contains("takes packets of 3000"), "{reason}");
    assert!(failed(&verdicts[2]).1.contains("can be no topic"));
    let heard = audit.heard().await;
    assert_eq!((heard.len(), heard[0].topic.as_str(), heard[0].payload.as_slice()), (2, "shop/orders", &b"x"[..]));
    let property =
        |name: &str| heard[0].properties.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str());
    assert_eq!((property("postroom-type"), property("tenant-id")), (Some("order.placed"), Some("t")));
    assert_eq!((property("n ä"), property("postroom-key")), (Some("v:"), Some("k")));
    assert_eq!(property("postroom-id"), Some(small.id.to_string().as_str()));
}

#[tokio::test]
async fn an_event_is_one_of_cloudevents() {
    let server = server("");
    let audit = AuditSession::begin(&server.address(), "audit", "#").await;
    let message = message().aggregate("order", "o-1", 7);
    for mode in [CloudEvents::Binary, CloudEvents::Structured] {
        let mut options = options(&server);
        (options.cloudevents, options.source) = (Some(mode), Some("/shop".to_owned()));
        assert_eq!(published(&options, std::slice::from_ref(&message)).await, [Verdict::Stored]);
    }
    let heard = audit.heard().await;
    let property =
        |name: &str| heard[0].properties.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str());
    assert_eq!((property("id"), property("source")), (Some(message.id.to_string().as_str()), Some("/shop")));
    assert_eq!((property("subject"), property("specversion")), (Some("o-1"), Some("1.0")));
    assert_eq!(heard[0].payload, message.payload);
    let event: serde_json::Value = serde_json::from_slice(&heard[1].payload).unwrap();
    assert_eq!((&event["type"], &event["source"]), (&"order.placed".into(), &"/shop".into()));
}

/// More than the broker takes before it acks some.
#[tokio::test]
async fn a_batch_is_larger_than_the_window_of_the_broker() {
    let server = server("max_inflight_messages 3");
    let audit = AuditSession::begin(&server.address(), "audit", "#").await;
    let messages: Vec<Message> = (0..300).map(|_| message()).collect();
    assert!(published(&options(&server), &messages).await.iter().all(|verdict| *verdict == Verdict::Stored));
    let heard: Vec<String> = audit.heard().await.into_iter().map(|heard| heard.id).collect();
    assert_eq!(heard, messages.iter().map(|message| message.id.to_string()).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_session_gets_what_came_while_nobody_received() {
    let server = server("");
    let options_of = || MqttSubscriptionOptions::new(server.url(), &["shop/#"], "billing");
    let subscription = MqttSubscription::new(options_of()).unwrap();
    subscription.connect().await.unwrap();
    subscription.close().await;
    let messages: Vec<Message> = (0..50).map(|_| message()).collect();
    assert!(published(&options(&server), &messages).await.iter().all(|verdict| *verdict == Verdict::Stored));
    let mut received = Vec::new();
    while received.len() < messages.len() {
        let bound = Bound { messages: 1000, bytes: usize::MAX };
        let arrival =
            tokio::time::timeout(Duration::from_secs(30), subscription.receive(bound)).await.unwrap().unwrap();
        let Arrival::Messages(some) = arrival else { panic!("{arrival:?}") };
        received.extend(some.into_iter().map(|received| received.id.unwrap()));
    }
    assert_eq!(received, messages.iter().map(|message| message.id).collect::<Vec<_>>());
    // Another one with the same id ends the first.
    let other = MqttSubscription::new(options_of()).unwrap();
    other.connect().await.unwrap();
    let error = subscription.receive(Bound { messages: 1, bytes: 1 }).await.unwrap_err();
    let why = std::error::Error::source(&error).unwrap().to_string();
    // This version ends it before it has said why.
    assert!(why.contains("ended the connection"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_with_a_broker_or_an_option_is_told() {
    let dir = surroundings::scratch("mqtt-guarded");
    let rights = dir.join("rights");
    std::fs::write(&rights, "user relay\ntopic readwrite shop/#\n").unwrap();
    let users = dir.join("users");
    let made =
        std::process::Command::new("mosquitto_passwd").args(["-b", "-c"]).arg(&users).args(["relay", "p@ss"]).status();
    assert!(made.unwrap().success());
    let further = format!("allow_anonymous false\nacl_file {}\npassword_file {}", rights.display(), users.display());
    let server = server(&further);
    let at = server.address();
    let with = |login: &str| MqttOptions::new(format!("mqtt://{login}{at}"), "shop/{topic}");
    let found = with("relay:p%40ss@").check().await.unwrap();
    assert!(found.contains("20 at a time") && found.contains("not encrypted"), "{found}");
    for login in ["", "relay:wrong@"] {
        let error = with(login).check().await.unwrap_err();
        assert!(error.problem.contains(&at) && error.advice.contains("user and the password"), "{error:?}");
        assert!(!format!("{error:?}").contains("wrong"), "{error:?}");
        assert!(MqttSink::new(with(login)).unwrap().probe().await.is_err());
    }
    let elsewhere = MqttOptions { topic: "elsewhere".to_owned(), ..with("relay:p%40ss@") };
    let verdicts = published(&elsewhere, &[message()]).await;
    assert!(failed(&verdicts[0]).1.contains("not authorized"), "{verdicts:?}");
    let receiving =
        |topic: &str| MqttSubscriptionOptions::new(format!("mqtt://relay:p%40ss@{at}"), &[topic], "billing");
    assert!(receiving("shop/orders").check(&[]).await.unwrap().contains("shop/orders"));
    for (topic, client_id) in [("a#", "billing"), ("shop/#", "")] {
        let wrong = MqttSubscriptionOptions { client_id: client_id.to_owned(), ..receiving(topic) };
        assert!(MqttSubscription::new(wrong).is_err(), "{topic}");
    }
    for topic in ["", "{topic}#", "a+b", "{nonsense}"] {
        assert!(MqttSink::new(MqttOptions { topic: topic.to_owned(), ..with("") }).is_err(), "{topic}");
    }
    let nobody = MqttOptions::new("mqtt://127.0.0.1:1", "x").check().await.unwrap_err();
    assert!(nobody.problem.contains("127.0.0.1:1") && nobody.advice.contains("start the broker"), "{nobody:?}");
    assert!(MqttOptions::new(format!("mqtts://{at}"), "x").check().await.is_err());
}

#[tokio::test]
async fn a_broker_with_tls_is_verified_and_may_ask_for_a_certificate() {
    let dir = surroundings::scratch("mqtt-tls");
    let authority = Authority::create(&dir, "relay");
    let path = |path: &Path| path.display().to_string();
    let (root, issued, client) = (path(&authority.root), &authority.server, &authority.client);
    let port = postroom_testkit::services::ports::free().unwrap();
    let server = server(&format!(
        "listener {port} 127.0.0.1\ncafile {root}\ncertfile {}\nkeyfile {}\nrequire_certificate true",
        path(&issued.certificate),
        path(&issued.key)
    ));
    let audit = AuditSession::begin(&server.address(), "audit", "#").await;
    let of = |query: &str| MqttOptions::new(format!("mqtts://localhost:{port}?{query}"), "x");
    let trusted = format!("cacertfile={root}&certfile={}&keyfile={}", path(&client.certificate), path(&client.key));
    let found = of(&trusted).check().await.unwrap();
    assert!(found.contains("encrypted with TLS"), "{found}");
    assert_eq!(published(&of(&trusted), &[message()]).await, [Verdict::Stored]);
    assert!(of(&format!("cacertfile={root}")).check().await.is_err(), "it asks for a certificate");
    assert!(of("").check().await.unwrap_err().problem.contains("certificate"));
    assert_eq!(audit.heard().await.len(), 1);
}
