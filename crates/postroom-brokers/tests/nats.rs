//! What a real NATS server does to messages, streams and consumers, beyond what every broker is tested for.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use postroom::{
    Answer, Arrival, Batch, Bound, FailureKind, Message, Received, Sink, Subscription, Unavailable, Verdict,
};
use postroom_brokers::nats::{Begin, NatsOptions, NatsSink, NatsSubscription, NatsSubscriptionOptions};
use postroom_brokers::{SinkOptions, SubscriptionOptions};
use postroom_testkit::authority::Authority;
use postroom_testkit::nats::{AuditStream, publish_raw};
use postroom_testkit::services::NatsServer;
use postroom_testkit::surroundings::scratch;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;

const STREAM: &str = "ORDERS";
/// Nothing that is there takes longer to arrive.
const ARRIVES_WITHIN: Duration = Duration::from_secs(30);

async fn server(further: &str) -> NatsServer {
    NatsServer::start(&scratch("nats"), further).unwrap()
}

async fn stream(server: &NatsServer, settings: Value) -> AuditStream {
    AuditStream::create(&server.address(), STREAM, &["orders.>"], settings).await
}

fn message(subject: &str) -> Message {
    Message::new("orders", "order.placed", "x").key("k").routing_key(subject)
}

async fn published(sink: &NatsSink, messages: &[Message]) -> Vec<Verdict> {
    let mut verdicts = sink.publish(&Batch::new(messages.iter().cloned())).await.unwrap();
    (0..messages.len()).map(|place| verdicts.take(place)).collect()
}

fn failed(verdict: &Verdict) -> (FailureKind, String) {
    match verdict {
        Verdict::Failed(failure) => (failure.kind, failure.reason.clone()),
        other => panic!("{other:?}"),
    }
}

fn told(error: &Unavailable) -> String {
    format!("{error}: {}", std::error::Error::source(error).map(ToString::to_string).unwrap_or_default())
}

fn subscription(server: &NatsServer) -> NatsSubscription {
    NatsSubscription::new(NatsSubscriptionOptions::new(server.url(), STREAM, "billing")).unwrap()
}

/// The next messages, as many as are told.
async fn next(subscription: &NatsSubscription, count: usize) -> Vec<Received> {
    let mut all = Vec::new();
    while all.len() < count {
        let bound = Bound { messages: count - all.len(), bytes: usize::MAX };
        let arrived = tokio::time::timeout(ARRIVES_WITHIN, subscription.receive(bound)).await.expect("nothing arrives");
        match arrived.unwrap() {
            Arrival::Messages(received) => all.extend(received),
            Arrival::Revoked(partition) => panic!("{partition:?}"),
        }
    }
    all
}

#[tokio::test]
async fn a_message_that_cannot_be_stored_fails_alone_and_for_its_own_reason() {
    let server = server("max_payload: 2000").await;
    let audit = stream(&server, json!({ "max_msg_size": 1000 })).await;
    let sink = NatsSink::new(NatsOptions::new(server.url(), STREAM)).unwrap();
    let mut large = message("orders.a");
    large.payload = vec![7; 1500].into();
    let mut larger = message("orders.a");
    larger.payload = vec![7; 2500].into();
    let batch = [
        message("orders.a"),
        large,
        larger,
        message("elsewhere"),
        message("$JS.API.STREAM.DELETE.ORDERS"),
        message("orders.>"),
        message("orders.b"),
    ];
    let verdicts = published(&sink, &batch).await;
    assert_eq!((&verdicts[0], &verdicts[6]), (&Verdict::Stored, &Verdict::Stored));
    for (place, kind, reason) in [
        (1, FailureKind::Permanent, "max_msg_size"),
        (2, FailureKind::Permanent, "max_payload"),
        (3, FailureKind::Transient, "stream \"ORDERS\" takes orders.>"),
        (4, FailureKind::Permanent, "belongs to the server"),
        (5, FailureKind::Permanent, "wildcard"),
    ] {
        let found = failed(&verdicts[place]);
        assert!(found.0 == kind && found.1.contains(reason), "{place}: {found:?}");
    }
    let subjects: Vec<String> = audit.all().await.into_iter().map(|stored| stored.subject).collect();
    assert_eq!(subjects, ["orders.a", "orders.b"]);
}

#[tokio::test]
async fn a_full_stream_is_no_fault_of_a_message() {
    let server = server("").await;
    stream(&server, json!({ "max_msgs": 1, "discard": "new" })).await;
    let sink = NatsSink::new(NatsOptions::new(server.url(), STREAM)).unwrap();
    let verdicts = published(&sink, &[message("orders.a"), message("orders.a")]).await;
    assert_eq!(verdicts[0], Verdict::Stored);
    assert_eq!(failed(&verdicts[1]).0, FailureKind::Busy);
}

#[tokio::test]
async fn a_subject_of_another_stream_is_not_taken_for_stored() {
    let server = server("").await;
    stream(&server, json!({})).await;
    let other = AuditStream::create(&server.address(), "OTHER", &["other.>"], json!({})).await;
    let sink = NatsSink::new(NatsOptions::new(server.url(), STREAM)).unwrap();
    let verdicts = published(&sink, &[message("other.a")]).await;
    assert!(failed(&verdicts[0]).1.contains("another stream than \"ORDERS\""), "{verdicts:?}");
    assert!(other.all().await.is_empty());
}

#[tokio::test]
async fn what_the_user_may_not_publish_is_told_and_holds_up_nobody() {
    let users = "authorization { users: [ { user: relay, password: \"p/@\", permissions: {
                    publish: { deny: [\"orders.secret\"] } } } ] }";
    let server = server(users).await;
    let mut options = NatsOptions::new(server.url().replace("://", "://relay:p%2f%40@"), STREAM);
    options.subjects = vec!["orders.>".to_owned()];
    let sink = NatsSink::new(options).unwrap();
    let verdicts = published(&sink, &[message("orders.a"), message("orders.secret"), message("orders.b")]).await;
    assert_eq!((&verdicts[0], &verdicts[2]), (&Verdict::Stored, &Verdict::Stored));
    let (kind, reason) = failed(&verdicts[1]);
    assert!(kind == FailureKind::Transient && reason.contains("permission to publish"), "{reason}");

    let wrong = NatsOptions::new(server.url().replace("://", "://relay:secret@"), STREAM);
    let refused = wrong.check().await.unwrap_err();
    let text = format!("{} {}", refused.problem, refused.advice);
    assert!(
        text.contains("Authorization Violation") && text.contains("password") && !text.contains("secret"),
        "{text}"
    );
}

/// As docs/nats.md lists them.
#[tokio::test]
async fn the_permissions_in_the_document_are_enough_and_another_prefix_of_inboxes_is_used() {
    let docs = include_str!("../../../docs/nats.md");
    let listed = |row: &str| -> Vec<String> {
        let line = docs.lines().find(|line| line.starts_with(row)).unwrap();
        let subjects = line.split('`').skip(1).step_by(2).filter(|name| name.contains('$'));
        subjects.map(|subject| format!("{subject:?}")).collect()
    };
    let user = |name: &str, mut publish: Vec<String>| {
        publish.push("\"orders.>\"".to_owned());
        format!(
            "{{ user: {name}, password: x, permissions: {{ publish: {{ allow: [{}] }}, subscribe: {{ allow: [\"mine.>\"] }} }} }}",
            publish.join(", ")
        )
    };
    let users = [user("relay", listed("| publishing |")), user("filler", listed("| receiving |"))].join(", ");
    let server = server(&format!("authorization {{ users: [ {users} ] }}")).await;
    let url = |user: &str| server.url().replace("://", &format!("://{user}:x@"));
    let mut options = NatsOptions::new(url("relay"), STREAM);
    options.subjects = vec!["orders.>".to_owned()];
    options.inbox_prefix = "mine".to_owned();
    let sink = NatsSink::new(options.clone()).unwrap();
    let messages = [message("orders.a"), message("orders.b")];
    for _ in 0..2 {
        assert!(published(&sink, &messages).await.iter().all(|verdict| *verdict == Verdict::Stored));
    }
    options.check().await.unwrap();
    let mut options = NatsSubscriptionOptions::new(url("filler"), STREAM, "billing");
    options.inbox_prefix = "mine".to_owned();
    for count in [2, 1] {
        let subscription = NatsSubscription::new(options.clone()).unwrap();
        while subscription.connect().await.is_err() {
            tokio::task::yield_now().await;
        }
        let received = next(&subscription, count).await;
        subscription.settle(&[(received[count - 1].receipt, Answer::Requeue)]).await.unwrap();
        next(&subscription, 1).await;
        if count == 2 {
            subscription.settle(&[(received[0].receipt, Answer::Ack)]).await.unwrap();
        }
        subscription.close().await;
    }
}

#[tokio::test]
async fn a_stream_is_made_where_its_subjects_are_given_and_told_of_where_not() {
    let server = server("").await;
    let missing = NatsOptions::new(server.url(), STREAM);
    let inbox = NatsSubscriptionOptions::new(server.url(), STREAM, "billing");
    assert!(SubscriptionOptions::check(&inbox, &[]).await.is_err());
    assert!(missing.check().await.unwrap_err().advice.contains("nats stream add ORDERS"));
    let error = NatsSink::new(missing).unwrap().publish(&Batch::new([message("orders.a")])).await.unwrap_err();
    assert!(told(&error).contains("nats stream add ORDERS"), "{}", told(&error));
    let mut options = NatsOptions::new(server.url(), STREAM);
    options.subjects = vec!["orders.>".to_owned()];
    options.subject = "orders.{topic}.{key}".to_owned();
    let made = options.makes().unwrap();
    assert!(SubscriptionOptions::check(&inbox, &[made]).await.unwrap().contains("a route is going to create it"));
    let sink = NatsSink::new(options.clone()).unwrap();
    let keyless = Message::new("orders", "order.placed", "x");
    let verdicts = published(&sink, &[message("ignored"), keyless]).await;
    assert_eq!(verdicts[0], Verdict::Stored);
    assert!(failed(&verdicts[1]).1.contains("needs its key"), "{verdicts:?}");
    let found = options.check().await.unwrap();
    assert!(found.contains("has 1 messages, takes orders.>") && found.contains("120 s"), "{found}");
    let hazards = options.hazards().await.unwrap();
    assert!(hazards.len() == 1 && !hazards[0].is_known && hazards[0].problem.contains("not known"), "{hazards:?}");
}

#[tokio::test]
async fn settings_that_lose_what_was_confirmed_are_found() {
    let lazy = server("").await;
    let settings = json!({ "storage": "memory", "max_msgs": 10, "discard": "old", "max_msgs_per_subject": 1 });
    stream(&lazy, settings).await;
    let mut options = NatsOptions::new(lazy.url(), STREAM);
    options.monitoring_url = Some(lazy.monitoring_url());
    let hazards = options.hazards().await.unwrap();
    let problems: Vec<&str> = hazards.iter().map(|hazard| hazard.problem.as_str()).collect();
    assert!(hazards.len() == 4 && hazards.iter().all(|hazard| hazard.is_known), "{hazards:?}");
    for (problem, part) in problems.iter().zip(["in memory", "throws away", "newest 1 messages", "every 120 s"]) {
        assert!(problem.contains(part), "{problem}");
    }
    let careful = NatsServer::start_with_storage(&scratch("nats"), "sync_interval: always", "").unwrap();
    stream(&careful, json!({})).await;
    let mut options = NatsOptions::new(careful.url(), STREAM);
    options.monitoring_url = Some(careful.monitoring_url());
    assert_eq!(options.hazards().await.unwrap(), []);
}

#[tokio::test]
async fn a_duplicate_is_stored_once_and_believed_when_the_original_is_there() {
    let server = server("").await;
    let audit = stream(&server, json!({})).await;
    let sink = NatsSink::new(NatsOptions::new(server.url(), STREAM)).unwrap();
    let twice = [message("orders.a"), message("orders.a")];
    for _ in 0..2 {
        assert!(published(&sink, &twice).await.iter().all(|verdict| *verdict == Verdict::Stored));
    }
    let ids: Vec<String> = audit.all().await.into_iter().map(|stored| stored.id).collect();
    assert_eq!(ids, twice.iter().map(|message| message.id.to_string()).collect::<Vec<_>>());
    // Somebody has read it and it is gone: it was stored nevertheless.
    audit.drain().await;
    assert_eq!(published(&sink, &twice[..1]).await, [Verdict::Stored]);
    assert!(audit.all().await.is_empty());
}

/// No real server can be made to lie; this one confirms everything as a duplicate of a message that is another one, as servers before
/// 2.10 may do of an id that they had remembered and not stored.
#[tokio::test]
async fn a_duplicate_of_another_message_is_not_taken_for_stored() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("nats://{}", listener.local_addr().unwrap());
    let lying = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        stream.write_all(b"INFO {\"version\":\"2.9.0\",\"headers\":true,\"max_payload\":1048576}\r\n").await.unwrap();
        let mut line = String::new();
        while stream.read_line(&mut line).await.unwrap_or(0) > 0 {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            if words.first() == Some(&"PING") {
                stream.write_all(b"PONG\r\n").await.unwrap();
            }
            if words.first().is_some_and(|word| word.ends_with("PUB")) {
                let size: usize = words.last().unwrap().parse().unwrap();
                let mut rest = vec![0; size + 2];
                stream.read_exact(&mut rest).await.unwrap();
                let answer = match words[1] {
                    info if info.contains("STREAM.INFO") => r#"{"config":{"name":"ORDERS"}}"#.to_owned(),
                    // `NATS/1.0\r\nNats-Msg-Id: another\r\n\r\n`
                    get if get.contains("MSG.GET") => {
                        r#"{"message":{"hdrs":"TkFUUy8xLjANCk5hdHMtTXNnLUlkOiBhbm90aGVyDQoNCg=="}}"#.to_owned()
                    }
                    _ => r#"{"stream":"ORDERS","seq":7,"duplicate":true}"#.to_owned(),
                };
                let message = format!("MSG {} 1 {}\r\n{answer}\r\n", words[2], answer.len());
                stream.write_all(message.as_bytes()).await.unwrap();
            }
            line.clear();
        }
    });
    let sink = NatsSink::new(NatsOptions::new(url, STREAM)).unwrap();
    let verdicts = published(&sink, &[message("orders.a")]).await;
    assert!(matches!(&verdicts[0], Verdict::Unknown(reason) if reason.contains("another one")), "{verdicts:?}");
    lying.abort();
}

#[tokio::test]
async fn what_another_client_wrote_badly_blocks_nobody() {
    let server = server("").await;
    stream(&server, json!({})).await;
    let bad: [&[u8]; 3] = [
        b"NATS/1.0\r\nName: M\xfcller\r\nNats-Msg-Id: \xe9\r\n\r\n",
        b"NATS/1.0\r\nno colon\r\n: no name\r\n\r\n",
        b"NATS/1.0\r\npostroom-headers: {\"a\"\r\naggregate-version: seven\r\n\r\n",
    ];
    for headers in bad {
        publish_raw(&server.address(), "orders.a", headers, b"payload").await;
    }
    let sink = NatsSink::new(NatsOptions::new(server.url(), STREAM)).unwrap();
    let last = message("orders.b");
    published(&sink, std::slice::from_ref(&last)).await;
    let subscription = subscription(&server);
    let received = next(&subscription, 4).await;
    assert!(received[..3].iter().all(|one| one.id.is_none() && &one.message.payload[..] == b"payload"), "{received:?}");
    assert_eq!(received[0].message.headers["Name"], "M\u{fffd}ller");
    assert_eq!(received[3].id, Some(last.id));
}

#[tokio::test]
async fn one_receives_at_a_time_and_the_next_begins_behind_what_was_acked() {
    let server = server("").await;
    let audit = stream(&server, json!({})).await;
    let sink = NatsSink::new(NatsOptions::new(server.url(), STREAM)).unwrap();
    let messages: Vec<Message> = (0..10).map(|_| message("orders.a")).collect();
    published(&sink, &messages).await;
    let first = subscription(&server);
    let held = next(&first, 6).await;
    let refused = subscription(&server).connect().await.unwrap_err();
    assert!(told(&refused).contains("somebody else receives as \"billing_1\""), "{}", told(&refused));
    // The first two, and one behind them.
    let acks: Vec<_> = [0, 1, 4].map(|at: usize| (held[at].receipt, Answer::Ack)).into();
    first.settle(&acks).await.unwrap();
    first.close().await;
    let second = subscription(&server);
    while second.connect().await.is_err() {
        tokio::task::yield_now().await;
    }
    let again = next(&second, 8).await;
    let ids: Vec<_> = again.iter().map(|one| one.id.unwrap()).collect();
    assert_eq!(
        ids,
        messages[2..].iter().map(|message| message.id).collect::<Vec<_>>(),
        "I4: in the order of the stream"
    );
    // It was handed over, though perhaps not taken, all of it.
    assert!(again[..4].iter().all(|one| one.redelivered));
    let late = first.settle(&[(held[2].receipt, Answer::Ack)]).await;
    assert!(late.is_err(), "a session that is over settles nothing");
    // One consumer is left at the server.
    let names = audit.asked("CONSUMER.NAMES.ORDERS", json!({})).await;
    assert_eq!(names["consumers"], json!(["billing_2"]));
    // Whoever deletes it is noticed.
    audit.asked("CONSUMER.DELETE.ORDERS.billing_2", Value::Null).await;
    let bound = Bound { messages: 1, bytes: usize::MAX };
    let gone = second.receive(bound).await.unwrap_err();
    assert!(told(&gone).contains("deleted"), "{}", told(&gone));
}

/// A power failure or a restored backup takes the end of a stream back, and its consumers stay as they were. Here the consumer is put back
/// as it was, on a stream that was made anew.
#[tokio::test]
async fn a_stream_that_went_back_is_received_again_from_where_the_consumer_once_began() {
    for new in [3, 12] {
        let server = server("").await;
        let audit = stream(&server, json!({})).await;
        let sink = NatsSink::new(NatsOptions::new(server.url(), STREAM)).unwrap();
        let old: Vec<Message> = (0..10).map(|_| message("orders.a")).collect();
        published(&sink, &old).await;
        let first = subscription(&server);
        let received = next(&first, 10).await;
        first.settle(&received.iter().map(|one| (one.receipt, Answer::Ack)).collect::<Vec<_>>()).await.unwrap();
        first.close().await;
        let second = subscription(&server);
        while second.connect().await.is_err() {
            tokio::task::yield_now().await;
        }
        second.close().await;
        drop(second);
        let config = audit.asked("CONSUMER.INFO.ORDERS.billing_2", Value::Null).await["config"].clone();
        assert_eq!(config["opt_start_seq"], 11, "{config}");
        audit.asked("STREAM.DELETE.ORDERS", Value::Null).await;
        stream(&server, json!({})).await;
        audit.asked("CONSUMER.CREATE.ORDERS.billing_2", json!({ "stream_name": STREAM, "config": config })).await;
        let sent: Vec<Message> = (0..new).map(|_| message("orders.a")).collect();
        published(&sink, &sent).await;
        let third = subscription(&server);
        let ids: Vec<_> = next(&third, new).await.iter().map(|one| one.id.unwrap()).collect();
        assert_eq!(ids, sent.iter().map(|message| message.id).collect::<Vec<_>>(), "I1");
    }
}

#[tokio::test]
async fn a_consumer_of_somebody_else_is_neither_continued_nor_deleted() {
    let server = server("").await;
    let audit = stream(&server, json!({})).await;
    let config = json!({ "durable_name": "billing_4", "ack_policy": "explicit", "description": "a foreign app" });
    audit.asked("CONSUMER.CREATE.ORDERS.billing_4", json!({ "stream_name": STREAM, "config": config })).await;
    let refused = subscription(&server).connect().await.unwrap_err();
    assert!(told(&refused).contains("is not postroom's"), "{}", told(&refused));
    let options = NatsSubscriptionOptions::new(server.url(), STREAM, "billing");
    let checked = SubscriptionOptions::check(&options, &[]).await.unwrap_err();
    assert!(checked.advice.contains("another consumer"), "{checked:?}");
    let names = audit.asked("CONSUMER.NAMES.ORDERS", json!({})).await;
    assert_eq!(names["consumers"], json!(["billing_4"]));
}

#[tokio::test]
async fn a_consumer_that_begins_with_what_is_new_gets_nothing_older_and_everything_since() {
    let server = server("").await;
    stream(&server, json!({})).await;
    let sink = NatsSink::new(NatsOptions::new(server.url(), STREAM)).unwrap();
    published(&sink, &[message("orders.a"), message("orders.a")]).await;
    let mut options = NatsSubscriptionOptions::new(server.url(), STREAM, "billing");
    options.begin = Begin::New;
    let first = NatsSubscription::new(options.clone()).unwrap();
    first.connect().await.unwrap();
    first.close().await;
    let sent = [message("orders.b"), message("orders.c")];
    published(&sink, &sent).await;
    let second = NatsSubscription::new(options).unwrap();
    while second.connect().await.is_err() {
        tokio::task::yield_now().await;
    }
    let ids: Vec<_> = next(&second, 2).await.iter().map(|one| one.id.unwrap()).collect();
    assert_eq!(ids, [sent[0].id, sent[1].id]);
}

#[tokio::test]
async fn no_more_bytes_are_unsettled_than_configured_and_a_larger_message_comes_alone() {
    let server = server("").await;
    stream(&server, json!({})).await;
    let sink = NatsSink::new(NatsOptions::new(server.url(), STREAM)).unwrap();
    let messages: Vec<Message> = [1_000, 1_000, 50_000, 1_000]
        .into_iter()
        .map(|size: usize| {
            let mut message = message("orders.a");
            message.payload = vec![7; size].into();
            message
        })
        .collect();
    published(&sink, &messages).await;
    let mut options = NatsSubscriptionOptions::new(server.url(), STREAM, "billing");
    options.unsettled_bytes_max = 4_000;
    let subscription = NatsSubscription::new(options).unwrap();
    let held = next(&subscription, 2).await;
    let more = tokio::time::timeout(Duration::from_millis(300), next(&subscription, 1)).await;
    assert!(more.is_err(), "{more:?}");
    subscription.settle(&held.iter().map(|one| (one.receipt, Answer::Ack)).collect::<Vec<_>>()).await.unwrap();
    for message in &messages[2..] {
        let received = next(&subscription, 1).await;
        assert_eq!(received[0].id, Some(message.id));
        subscription.settle(&[(received[0].receipt, Answer::Ack)]).await.unwrap();
    }
}

#[tokio::test]
async fn a_server_that_was_killed_has_what_it_confirmed_and_goes_on() {
    let mut server = server("").await;
    let audit = stream(&server, json!({})).await;
    let sink = Arc::new(NatsSink::new(NatsOptions::new(server.url(), STREAM)).unwrap());
    let mut stored = Vec::new();
    for round in 0..5 {
        let messages: Vec<Message> = (0..200).map(|_| message("orders.a")).collect();
        let publishing = {
            let (sink, messages) = (sink.clone(), messages.clone());
            tokio::spawn(async move { sink.publish(&Batch::new(messages)).await })
        };
        if round % 2 == 1 {
            server.kill().unwrap();
            server.start_again().unwrap();
        }
        if let Ok(mut verdicts) = publishing.await.unwrap() {
            let is_stored = |place: &usize| verdicts.take(*place) == Verdict::Stored;
            stored.extend((0..200).filter(is_stored).map(|place| messages[place].id.to_string()));
        }
    }
    assert!(stored.len() >= 600, "{} were stored", stored.len());
    let there: Vec<String> = audit.all().await.into_iter().map(|stored| stored.id).collect();
    assert!(stored.iter().all(|id| there.contains(id)), "I1");
}

#[tokio::test]
async fn certificates_of_a_private_authority_are_verified_both_ways() {
    let ca = Authority::create(&scratch("authority"), "relay");
    let files = (ca.server.certificate.display(), ca.server.key.display(), ca.root.display());
    let tls = format!(
        "tls {{ cert_file: {:?}, key_file: {:?}, ca_file: {:?}, verify: true }}",
        files.0.to_string(),
        files.1.to_string(),
        files.2.to_string()
    );
    let server = server(&tls).await;
    let url = server.url().replace("nats://", "tls://");
    let (root, certificate, key) = (ca.root.display(), ca.client.certificate.display(), ca.client.key.display());
    let checked = async |url: String| {
        let mut options = NatsOptions::new(url, STREAM);
        options.subjects = vec!["orders.>".to_owned()];
        options.check().await.map_err(|failed| failed.problem)
    };
    let found = checked(format!("{url}?cacertfile={root}&certfile={certificate}&keyfile={key}")).await.unwrap();
    assert!(found.contains("encrypted with TLS"), "{found}");
    let unknown = checked(url.clone()).await.unwrap_err();
    assert!(unknown.contains("cacertfile="), "{unknown}");
    let unasked = checked(format!("{url}?cacertfile={root}")).await.unwrap_err();
    assert!(unasked.contains("client certificate") || unasked.contains("ended the connection"), "{unasked}");
    // The server insists on it, whatever the URL says.
    let plain = checked(server.url()).await.unwrap_err();
    assert!(plain.contains("certificate"), "{plain}");

    let without = self::server("").await;
    let refused = checked(without.url().replace("nats://", "tls://")).await.unwrap_err();
    assert!(refused.contains("has no TLS"), "{refused}");
}
