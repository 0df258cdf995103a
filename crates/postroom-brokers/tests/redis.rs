//! What a real Redis does to messages, streams and groups, beyond what every broker is tested for.

#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use postroom::{
    Answer, Arrival, Batch, Bound, FailureKind, Message, Received, Sink, Subscription, Unavailable, Verdict,
};
use postroom_brokers::redis::{RedisOptions, RedisSink, RedisSubscription, RedisSubscriptionOptions};
use postroom_brokers::{SinkOptions, SubscriptionOptions};
use postroom_testkit::authority::Authority;
use postroom_testkit::redis::{Said, ask, entries};
use postroom_testkit::services::RedisServer;
use postroom_testkit::surroundings::scratch;

/// Nothing that is there takes longer to arrive.
const ARRIVES_WITHIN: Duration = Duration::from_secs(30);

fn server(further: &str) -> RedisServer {
    RedisServer::start(&scratch("redis"), further).unwrap()
}

fn message(stream: &str) -> Message {
    Message::new("orders", "order.placed", "x").key("k").routing_key(stream)
}

fn sink(server: &RedisServer) -> RedisSink {
    RedisSink::new(RedisOptions::new(server.url(), "{routing_key}")).unwrap()
}

async fn published(sink: &RedisSink, messages: &[Message]) -> Vec<Verdict> {
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

fn options(server: &RedisServer, streams: &[&str]) -> RedisSubscriptionOptions {
    RedisSubscriptionOptions::new(server.url(), streams, "billing")
}

/// Begins a session as soon as the one before has told the server that it is gone.
async fn subscribed(options: RedisSubscriptionOptions) -> RedisSubscription {
    let subscription = RedisSubscription::new(options).unwrap();
    while let Err(error) = subscription.connect().await {
        assert!(told(&error).contains("somebody else"), "{}", told(&error));
        tokio::task::yield_now().await;
    }
    subscription
}

/// The next messages, as many as are told.
async fn next(subscription: &RedisSubscription, count: usize) -> Vec<Received> {
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

async fn settle(subscription: &RedisSubscription, received: &[Received], answer: Answer) {
    let answers: Vec<_> = received.iter().map(|received| (received.receipt, answer)).collect();
    subscription.settle(&answers).await.unwrap();
}

fn ids(received: &[Received]) -> Vec<String> {
    received.iter().map(|received| received.id.unwrap().to_string()).collect()
}

fn ids_of(messages: &[Message]) -> Vec<String> {
    messages.iter().map(|message| message.id.to_string()).collect()
}

/// What the server says of a group, until it is this.
async fn group_is(server: &RedisServer, stream: &str, field: &str, value: &str) {
    for turn in 0.. {
        let groups = ask(&server.address(), &["XINFO", "GROUPS", stream]).await;
        let pairs = groups.array().first().map_or(&[] as &[Said], Said::array);
        let found = pairs.chunks_exact(2).find(|pair| pair[0].text() == field).map(|pair| pair[1].text());
        if found.as_deref() == Some(value) {
            return;
        }
        assert!(turn < 3_000, "{field} is {found:?}, and not {value}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_message_that_cannot_be_stored_fails_alone_and_for_its_own_reason() {
    let server = server("user relay on >secret ~orders* +@all\nuser default on nopass ~* +@all");
    ask(&server.address(), &["SET", "orders.text", "x"]).await;
    let url = server.url().replace("://", "://relay:secret@");
    let sink = RedisSink::new(RedisOptions::new(url, "{routing_key}")).unwrap();
    let batch =
        [message("orders"), message("orders.text"), message("elsewhere"), message("orders\n"), message("orders")];
    let verdicts = published(&sink, &batch).await;
    assert_eq!((&verdicts[0], &verdicts[4]), (&Verdict::Stored, &Verdict::Stored));
    for (place, kind, reason) in [
        (1, FailureKind::Transient, "is no stream"),
        (2, FailureKind::Transient, "NOPERM"),
        (3, FailureKind::Permanent, "control characters"),
    ] {
        let found = failed(&verdicts[place]);
        assert!(found.0 == kind && found.1.contains(reason), "{place}: {found:?}");
    }
    assert_eq!(entries(&server.address(), "orders").await.len(), 2);
}

#[tokio::test]
async fn a_server_that_takes_nothing_for_now_is_no_fault_of_a_message() {
    let server = server("");
    let sink = sink(&server);
    assert_eq!(published(&sink, &[message("orders")]).await, [Verdict::Stored]);
    for (setting, value, back, reason) in
        [("maxmemory", "1", "0", "OOM"), ("min-replicas-to-write", "1", "0", "NOREPLICAS")]
    {
        ask(&server.address(), &["CONFIG", "SET", setting, value]).await;
        let (kind, why) = failed(&published(&sink, &[message("orders")]).await[0]);
        assert!(kind == FailureKind::Busy && why.contains(reason), "{kind:?} {why}");
        ask(&server.address(), &["CONFIG", "SET", setting, back]).await;
        assert_eq!(published(&sink, &[message("orders")]).await, [Verdict::Stored]);
    }
    // What was the primary.
    ask(&server.address(), &["REPLICAOF", "127.0.0.1", "1"]).await;
    let (kind, why) = failed(&published(&sink, &[message("orders")]).await[0]);
    assert!(kind == FailureKind::Busy && why.contains("READONLY"), "{kind:?} {why}");
    assert!(sink.disconnected().is_some(), "another server may have the name now");
    ask(&server.address(), &["REPLICAOF", "NO", "ONE"]).await;
    assert_eq!(published(&sink, &[message("orders")]).await, [Verdict::Stored]);
}

#[tokio::test]
async fn a_message_is_stored_when_as_many_replicas_have_it_as_asked_for() {
    let primary = server("repl-diskless-sync-delay 0");
    let mut options = RedisOptions::new(primary.url(), "orders");
    options.replicas = 1;
    let sink = RedisSink::new(options).unwrap();
    let refused = sink.publish(&Batch::new([message("x")])).await.unwrap_err();
    assert!(told(&refused).contains("0 of 1 replicas"), "{}", told(&refused));
    let mut checked = RedisOptions::new(primary.url(), "orders");
    checked.replicas = 1;
    assert!(checked.check().await.unwrap_err().problem.contains("0 of 1 replicas"));
    assert_eq!(entries(&primary.address(), "orders").await, [], "nothing is added that could not be confirmed");
    let port = primary.address().rsplit(':').next().unwrap().to_owned();
    let replica = server(&format!("replicaof 127.0.0.1 {port}"));
    while sink.probe().await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let sent = [message("x"), message("x")];
    assert_eq!(published(&sink, &sent).await, [Verdict::Stored, Verdict::Stored]);
    let there: Vec<String> = entries(&replica.address(), "orders").await.into_iter().map(|entry| entry.id).collect();
    assert_eq!(there, ids_of(&sent));
    // It is there, and hears nothing more: not known, once, and then nothing more is added.
    replica.pause().unwrap();
    let verdicts = published(&sink, &[message("x")]).await;
    assert!(matches!(&verdicts[0], Verdict::Unknown(why) if why.contains("0 of 1 replicas")), "{verdicts:?}");
    let before = entries(&primary.address(), "orders").await.len();
    let refused = sink.publish(&Batch::new([message("x")])).await;
    replica.resume().unwrap();
    // A paused replica has confirmed the nothing that a new connection has written; what follows is not known again.
    if let Ok(mut verdicts) = refused {
        assert!(matches!(verdicts.take(0), Verdict::Unknown(_)));
    }
    assert!(entries(&primary.address(), "orders").await.len() <= before + 1);
}

#[tokio::test]
async fn a_server_without_waitaof_is_told_of() {
    let server = server("");
    let mut options = RedisOptions::new(server.url(), "orders");
    options.synced = true;
    let sink = RedisSink::new(options).unwrap();
    match sink.publish(&Batch::new([message("x")])).await {
        Err(refused) => assert!(told(&refused).contains("Redis 7.2"), "{}", told(&refused)),
        // A newer one, which has it.
        Ok(mut verdicts) => assert_eq!(verdicts.take(0), Verdict::Stored),
    }
}

#[tokio::test]
async fn what_a_check_finds_is_told_with_what_to_do() {
    let server = server("user relay on >secret ~orders +@all -config -info\nuser default on nopass ~* +@all");
    let url = |user: &str| server.url().replace("://", &format!("://{user}@"));
    let checked = async |url: String, stream: &str| RedisOptions::new(url, stream).check().await;
    let found = checked(server.url(), "orders").await.unwrap();
    assert!(
        found.contains("will be created") && found.contains("Redis 7.") && found.contains("not encrypted"),
        "{found}"
    );
    assert_eq!(ask(&server.address(), &["EXISTS", "orders"]).await, Said::Number(0), "a check changes nothing");
    published(&sink(&server), &[message("orders")]).await;
    assert!(checked(url("relay:secret"), "orders").await.unwrap().contains("has 1 entries"));
    assert_eq!(entries(&server.address(), "orders").await.len(), 1, "a check changes nothing");
    let wrong = checked(url("relay:hunter2"), "orders").await.unwrap_err();
    assert!(wrong.problem.contains("WRONGPASS") && wrong.advice.contains("password"), "{wrong:?}");
    assert!(!format!("{wrong:?}").contains("hunter2"));
    let forbidden = checked(url("relay:secret"), "payments").await.unwrap_err();
    assert!(forbidden.problem.contains("NOPERM") && forbidden.advice.contains("docs/redis.md"), "{forbidden:?}");
    ask(&server.address(), &["SET", "text", "x"]).await;
    assert!(checked(server.url(), "text").await.unwrap_err().problem.contains("is a string"));
    ask(&server.address(), &["CONFIG", "SET", "maxmemory", "1"]).await;
    assert!(checked(server.url(), "orders").await.unwrap_err().advice.contains("maxmemory"));
    ask(&server.address(), &["CONFIG", "SET", "maxmemory", "0"]).await;
    assert!(checked("redis://127.0.0.1:1".to_owned(), "orders").await.unwrap_err().problem.contains("127.0.0.1:1"));

    assert_eq!(RedisOptions::new(server.url(), "orders").hazards().await.unwrap(), []);
    let unseen = RedisOptions::new(url("relay:secret"), "orders").hazards().await.unwrap();
    assert!(unseen.len() == 1 && !unseen[0].is_known, "{unseen:?}");
    for (setting, value) in [("appendfsync", "everysec"), ("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")] {
        ask(&server.address(), &["CONFIG", "SET", setting, value]).await;
    }
    ask(&server.address(), &["EXPIRE", "orders", "1000"]).await;
    let found = RedisOptions::new(server.url(), "orders").hazards().await.unwrap();
    for (hazard, part) in found.iter().zip(["everysec", "whole streams", "expires"]) {
        assert!(hazard.is_known && hazard.problem.contains(part), "{hazard:?}");
    }
    assert_eq!(found.len(), 3);
    ask(&server.address(), &["CONFIG", "SET", "appendonly", "no"]).await;
    let found = RedisOptions::new(server.url(), "orders").hazards().await.unwrap();
    assert!(found[0].problem.contains("append-only"), "{found:?}");
}

/// As docs/redis.md lists them.
#[tokio::test]
async fn the_rights_in_the_document_are_enough() {
    let docs = include_str!("../../../docs/redis.md");
    let rights = |what: &str| docs.lines().find_map(|line| line.strip_prefix(what)).unwrap().trim();
    let users = format!(
        "user relay on >x resetkeys {}\nuser filler on >x resetkeys {}\nuser default on nopass ~* +@all",
        rights("publishing "),
        rights("receiving ")
    );
    let server = server(&users);
    let url = |user: &str| server.url().replace("://", &format!("://{user}:x@"));
    let options = RedisOptions::new(url("relay"), "orders");
    options.check().await.unwrap();
    let sink = RedisSink::new(options).unwrap();
    sink.probe().await.unwrap();
    let sent = [message("x"), message("x")];
    assert_eq!(published(&sink, &sent).await, [Verdict::Stored, Verdict::Stored]);
    let mut options = RedisSubscriptionOptions::new(url("filler"), &["orders"], "billing");
    options.removes = true;
    SubscriptionOptions::check(&options, &[]).await.unwrap();
    let subscription = subscribed(options).await;
    let received = next(&subscription, 2).await;
    settle(&subscription, &received[..1], Answer::Ack).await;
    let at = entries(&server.address(), "orders").await[0].at.clone();
    group_is(&server, "orders", "entries-read", "1").await;
    subscription.close().await;
    assert_eq!(entries(&server.address(), "orders").await[0].at, at, "the place itself stays");
}

#[tokio::test]
async fn streams_are_received_in_order_from_where_the_group_is() {
    let server = server("");
    let sink = sink(&server);
    let (orders, payments): (Vec<Message>, Vec<Message>) =
        (0..50).map(|_| (message("orders"), message("payments"))).unzip();
    published(&sink, &orders).await;
    published(&sink, &payments[..20]).await;
    let both = || options(&server, &["orders", "payments"]);
    let subscription = subscribed(both()).await;
    let mut received = next(&subscription, 70).await;
    published(&sink, &payments[20..]).await;
    received.extend(next(&subscription, 30).await);
    let of = |stream: &str| {
        let of: Vec<Received> =
            received.iter().filter(|one| one.message.routing_key.as_deref() == Some(stream)).cloned().collect();
        of
    };
    assert_eq!((ids(&of("orders")), ids(&of("payments"))), (ids_of(&orders), ids_of(&payments)));
    assert!(received.iter().all(|one| !one.redelivered));
    // Out of order: behind what is open, the group cannot be.
    settle(&subscription, &of("orders")[10..], Answer::Ack).await;
    settle(&subscription, &of("payments")[..30], Answer::Ack).await;
    group_is(&server, "payments", "entries-read", "30").await;
    group_is(&server, "payments", "lag", "20").await;
    subscription.close().await;
    let again = subscribed(both()).await;
    let received = next(&again, 70).await;
    assert!(received.iter().all(|one| one.redelivered));
    let first = received.iter().find(|one| one.message.routing_key.as_deref() == Some("payments")).unwrap();
    assert_eq!(first.id, Some(payments[30].id));
    settle(&again, &received, Answer::Ack).await;
    group_is(&server, "orders", "entries-read", "50").await;
    group_is(&server, "orders", "lag", "0").await;
}

#[tokio::test]
async fn one_session_receives_at_a_time_and_one_that_hangs_can_take_nothing_along() {
    let server = server("");
    let sink = sink(&server);
    let sent: Vec<Message> = (0..20).map(|_| message("orders")).collect();
    published(&sink, &sent).await;
    let first = subscribed(options(&server, &["orders"]).of_consumer("billing")).await;
    let held = next(&first, 20).await;
    let refused = RedisSubscription::new(options(&server, &["orders"])).unwrap().connect().await.unwrap_err();
    assert!(told(&refused).contains("somebody else receives"), "{}", told(&refused));
    let other = options(&server, &["orders"]).of_consumer("shipping");
    let refused = RedisSubscription::new(other).unwrap().connect().await.unwrap_err();
    assert!(told(&refused).contains("belongs to consumer \"billing\""), "{}", told(&refused));
    // As if it had hung for long enough: another one has taken the group.
    let consumers = ask(&server.address(), &["XINFO", "CONSUMERS", "orders", "billing"]).await;
    let note = consumers.array()[0].array()[1].text();
    let taken = note.replace(note.split(' ').nth(2).unwrap(), "another");
    ask(&server.address(), &["XGROUP", "CREATECONSUMER", "orders", "billing", &taken]).await;
    ask(&server.address(), &["XGROUP", "DELCONSUMER", "orders", "billing", &note]).await;
    let _ = first.settle(&held.iter().map(|one| (one.receipt, Answer::Ack)).collect::<Vec<_>>()).await;
    let over = first.receive(Bound { messages: 9, bytes: usize::MAX });
    let over = tokio::time::timeout(ARRIVES_WITHIN, over).await.expect("it hears of that");
    let over = told(&over.unwrap_err());
    assert!(over.contains("somebody else has taken the group"), "{over}");
    group_is(&server, "orders", "last-delivered-id", "0-0").await;
    ask(&server.address(), &["XGROUP", "DELCONSUMER", "orders", "billing", &taken]).await;
    let second = subscribed(options(&server, &["orders"])).await;
    assert_eq!(ids(&next(&second, 20).await), ids_of(&sent), "I1");
}

#[tokio::test]
async fn a_group_that_other_programs_use_is_left_alone() {
    let server = server("");
    let sink = sink(&server);
    published(&sink, &[message("orders"), message("orders")]).await;
    let address = server.address();
    ask(&address, &["XGROUP", "CREATE", "orders", "billing", "0"]).await;
    ask(&address, &["XREADGROUP", "GROUP", "billing", "worker-1", "COUNT", "1", "STREAMS", "orders", ">"]).await;
    let connect = async || RedisSubscription::new(options(&server, &["orders"])).unwrap().connect().await;
    let refused = told(&connect().await.unwrap_err());
    assert!(refused.contains("worker-1") && refused.contains("XGROUP DELCONSUMER"), "{refused}");
    let checked = SubscriptionOptions::check(&options(&server, &["orders"]), &[]).await.unwrap_err();
    assert!(checked.problem.contains("worker-1"), "{checked:?}");
    // Without the consumer, the group is where it was left: what was handed out before is not asked for again.
    ask(&address, &["XGROUP", "DELCONSUMER", "orders", "billing", "worker-1"]).await;
    let subscription = subscribed(options(&server, &["orders"])).await;
    assert_eq!(next(&subscription, 1).await.len(), 1);
}

#[tokio::test]
async fn a_stream_that_is_made_anew_is_received_from_its_beginning_and_a_group_that_is_moved_is_followed() {
    let server = server("");
    let sink = sink(&server);
    let address = server.address();
    published(&sink, &[message("orders"), message("orders")]).await;
    let subscription = subscribed(options(&server, &["orders"])).await;
    let received = next(&subscription, 2).await;
    settle(&subscription, &received, Answer::Ack).await;
    group_is(&server, "orders", "entries-read", "2").await;
    // With the group in it.
    ask(&address, &["DEL", "orders"]).await;
    let sent: Vec<Message> = (0..5).map(|_| message("orders")).collect();
    published(&sink, &sent).await;
    let mut seen = Vec::new();
    while seen.len() < 5 || seen[seen.len() - 5..] != ids_of(&sent) {
        match subscription.receive(Bound { messages: 100, bytes: usize::MAX }).await {
            Ok(Arrival::Messages(received)) => {
                seen.extend(ids(&received));
                let _ = subscription
                    .settle(&received.iter().map(|one| (one.receipt, Answer::Ack)).collect::<Vec<_>>())
                    .await;
            }
            Ok(other) => panic!("{other:?}"),
            Err(error) => assert!(told(&error).contains("orders"), "{}", told(&error)),
        }
    }
    // Those that the session before had read of the new stream come again.
    let settled = async {
        loop {
            if let Ok(Arrival::Messages(received)) =
                subscription.receive(Bound { messages: 9, bytes: usize::MAX }).await
            {
                let all: Vec<_> = received.iter().map(|one| (one.receipt, Answer::Ack)).collect();
                let _ = subscription.settle(&all).await;
            }
        }
    };
    tokio::select! {
        () = settled => {}
        () = group_is(&server, "orders", "entries-read", "5") => {}
    }
    ask(&address, &["XGROUP", "SETID", "orders", "billing", "0", "ENTRIESREAD", "0"]).await;
    let moved = loop {
        match subscription.receive(Bound { messages: 100, bytes: usize::MAX }).await {
            Err(error) => break told(&error),
            Ok(arrival) => assert!(matches!(arrival, Arrival::Messages(_))),
        }
    };
    assert!(moved.contains("moved the group to 0-0"), "{moved}");
    assert_eq!(ids(&next(&subscription, 5).await), ids_of(&sent), "what an operator sends again");
}

#[tokio::test]
async fn no_more_bytes_are_unsettled_than_configured_and_a_larger_message_comes_alone() {
    let server = server("");
    let messages: Vec<Message> = [1_000, 1_000, 50_000, 1_000]
        .into_iter()
        .map(|size: usize| {
            let mut message = message("orders");
            message.payload = vec![7; size].into();
            message
        })
        .collect();
    published(&sink(&server), &messages).await;
    let mut options = options(&server, &["orders"]);
    options.unsettled_bytes_max = 1_500;
    let subscription = subscribed(options).await;
    let held = next(&subscription, 2).await;
    let more = tokio::time::timeout(Duration::from_millis(300), next(&subscription, 1)).await;
    assert!(more.is_err(), "{more:?}");
    settle(&subscription, &held, Answer::Ack).await;
    for message in &messages[2..] {
        let received = next(&subscription, 1).await;
        assert_eq!(received[0].id, Some(message.id));
        settle(&subscription, &received, Answer::Ack).await;
    }
}

/// A database that was not chosen would take everything, and nobody would find it there.
#[tokio::test]
async fn a_database_that_cannot_be_chosen_is_told_and_nothing_goes_into_another() {
    let server = server("user relay on >x ~* +xadd +xread +eval\nuser default on nopass ~* +@all");
    let url = server.url().replace("://", "://relay:x@") + "/3";
    let sink = RedisSink::new(RedisOptions::new(url.as_str(), "orders")).unwrap();
    let refused = sink.publish(&Batch::new([message("x")])).await.unwrap_err();
    assert!(told(&refused).contains("NOPERM"), "{}", told(&refused));
    let inbox = RedisSubscription::new(RedisSubscriptionOptions::new(url, &["orders"], "billing")).unwrap();
    assert!(told(&inbox.connect().await.unwrap_err()).contains("NOPERM"));
    assert_eq!(ask(&server.address(), &["DBSIZE"]).await, Said::Number(0));
}

/// The one who makes room must not wait for it.
#[tokio::test]
async fn a_full_server_is_received_from() {
    let server = server("");
    let sink = sink(&server);
    let sent: Vec<Message> = (0..50).map(|_| message("orders")).collect();
    published(&sink, &sent).await;
    let mut options = options(&server, &["orders"]);
    options.removes = true;
    let subscription = subscribed(options.clone()).await;
    let first = next(&subscription, 20).await;
    ask(&server.address(), &["CONFIG", "SET", "maxmemory", "1"]).await;
    settle(&subscription, &first, Answer::Ack).await;
    group_is(&server, "orders", "entries-read", "20").await;
    subscription.close().await;
    let again = subscribed(options).await;
    let rest = next(&again, 30).await;
    assert_eq!(ids(&rest), ids_of(&sent[20..]));
    settle(&again, &rest, Answer::Ack).await;
    group_is(&server, "orders", "entries-read", "50").await;
    assert_eq!(entries(&server.address(), "orders").await.len(), 1);
}

/// What is handed to somebody else would never come here.
#[tokio::test]
async fn a_program_that_reads_in_the_group_is_told_of_with_what_puts_the_group_back() {
    let server = server("");
    let address = server.address();
    let sent: Vec<Message> = (0..10).map(|_| message("orders")).collect();
    published(&sink(&server), &sent).await;
    let subscription = subscribed(options(&server, &["orders"])).await;
    let received = next(&subscription, 10).await;
    settle(&subscription, &received[..4], Answer::Ack).await;
    group_is(&server, "orders", "entries-read", "4").await;
    ask(&address, &["XREADGROUP", "GROUP", "billing", "curious", "COUNT", "10", "STREAMS", "orders", ">"]).await;
    let bound = Bound { messages: 9, bytes: usize::MAX };
    let over = tokio::time::timeout(ARRIVES_WITHIN, subscription.receive(bound)).await.expect("it hears of that");
    assert!(told(&over.unwrap_err()).contains("reads in it"));
    let refused = told(&subscription.connect().await.unwrap_err());
    let commands: Vec<&str> = refused.split('`').filter(|part| part.starts_with("XGROUP ")).collect();
    assert_eq!(commands.len(), 2, "{refused}");
    for command in commands {
        let words: Vec<&str> = command.split(' ').collect();
        assert!(!matches!(ask(&address, &words).await, Said::Error(_)), "{command}");
    }
    let again = subscribed(options(&server, &["orders"])).await;
    assert_eq!(ids(&next(&again, 6).await), ids_of(&sent[4..]), "I1");
}

/// The last one that there can be, and streams that have nothing.
#[tokio::test]
async fn neither_the_last_entry_nor_many_idle_streams_hold_up_a_session() {
    let server = server("");
    let address = server.address();
    let last = format!("{}-{}", u64::MAX, u64::MAX);
    ask(&address, &["XADD", "orders", &last, "payload", "x"]).await;
    let idle: Vec<String> = (0..100).map(|n| format!("idle-{n}")).collect();
    let mut streams: Vec<&str> = idle.iter().map(String::as_str).collect();
    streams.push("orders");
    streams.push("payments");
    let mut options = options(&server, &streams);
    options.prefetch = 2;
    let subscription = subscribed(options).await;
    let received = next(&subscription, 1).await;
    assert_eq!(received[0].id, None);
    settle(&subscription, &received, Answer::Ack).await;
    group_is(&server, "orders", "last-delivered-id", &last).await;
    let sent: Vec<Message> = (0..200).map(|_| message("payments")).collect();
    published(&sink(&server), &sent).await;
    let mut seen = Vec::new();
    while seen.len() < 200 {
        let received = next(&subscription, 1).await;
        seen.extend(ids(&received));
        settle(&subscription, &received, Answer::Ack).await;
    }
    assert_eq!(seen, ids_of(&sent));
    group_is(&server, "payments", "entries-read", "200").await;
    group_is(&server, "orders", "entries-read", "1").await;
}

/// The server knows how many entries a group has received, and so do sessions that come later.
#[tokio::test]
async fn what_was_removed_before_it_was_received_is_counted_once() {
    let server = server("");
    let address = server.address();
    let sent: Vec<Message> = (0..100).map(|_| message("orders")).collect();
    published(&sink(&server), &sent).await;
    let first = subscribed(options(&server, &["orders"])).await;
    let received = next(&first, 100).await;
    settle(&first, &received[..20], Answer::Ack).await;
    group_is(&server, "orders", "entries-read", "20").await;
    first.close().await;
    // 30 from the beginning, of which 10 were not received, and 5 from the end.
    ask(&address, &["XTRIM", "orders", "MAXLEN", "70"]).await;
    for entry in &entries(&address, "orders").await[65..] {
        ask(&address, &["XDEL", "orders", &entry.at]).await;
    }
    let second = subscribed(options(&server, &["orders"])).await;
    let received = next(&second, 65).await;
    settle(&second, &received, Answer::Ack).await;
    group_is(&server, "orders", "entries-read", "100").await;
    // Made by hand, without a number.
    ask(&address, &["XGROUP", "CREATE", "orders", "shipping", "0"]).await;
    let mut options = options(&server, &["orders"]);
    options.group = "shipping".to_owned();
    let third = subscribed(options).await;
    let received = next(&third, 65).await;
    settle(&third, &received, Answer::Ack).await;
    for turn in 0.. {
        let groups = ask(&address, &["XINFO", "GROUPS", "orders"]).await;
        let counted = |group: &Said| {
            let pairs = group.array().chunks_exact(2);
            pairs.into_iter().any(|pair| pair[0].text() == "entries-read" && pair[1] == Said::Number(100))
        };
        if groups.array().iter().all(counted) {
            break;
        }
        assert!(turn < 3_000, "{groups:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_session_whose_connections_ended_is_followed_at_once_by_its_own_receiver() {
    let server = server("");
    let sent: Vec<Message> = (0..20).map(|_| message("orders")).collect();
    published(&sink(&server), &sent).await;
    let subscription = subscribed(options(&server, &["orders"])).await;
    next(&subscription, 20).await;
    ask(&server.address(), &["CLIENT", "KILL", "TYPE", "normal"]).await;
    let bound = Bound { messages: 20, bytes: usize::MAX };
    let ended = tokio::time::timeout(ARRIVES_WITHIN, subscription.receive(bound)).await.expect("it hears of that");
    assert!(ended.is_err(), "{ended:?}");
    subscription.connect().await.unwrap();
    let again = next(&subscription, 20).await;
    assert_eq!(ids(&again), ids_of(&sent));
    assert!(again.iter().all(|one| one.redelivered));
}

#[tokio::test]
async fn entries_are_removed_when_all_groups_are_behind_them() {
    let server = server("");
    let address = server.address();
    let sent: Vec<Message> = (0..10).map(|_| message("orders")).collect();
    published(&sink(&server), &sent).await;
    ask(&address, &["XGROUP", "CREATE", "orders", "others", "0"]).await;
    ask(&address, &["XREADGROUP", "GROUP", "others", "w", "COUNT", "6", "STREAMS", "orders", ">"]).await;
    let mut options = options(&server, &["orders"]);
    options.removes = true;
    let subscription = subscribed(options).await;
    let received = next(&subscription, 10).await;
    settle(&subscription, &received[..8], Answer::Ack).await;
    group_is(&server, "orders", "entries-read", "8").await;
    assert_eq!(entries(&address, "orders").await.len(), 10, "the other group has acked nothing");
    let all = entries(&address, "orders").await;
    for entry in &all[..6] {
        ask(&address, &["XACK", "orders", "others", &entry.at]).await;
    }
    settle(&subscription, &received[8..], Answer::Ack).await;
    for turn in 0.. {
        let left = entries(&address, "orders").await;
        if left.len() == 5 && left[0].at == all[5].at {
            break;
        }
        assert!(turn < 1_000, "{} are left", left.len());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_server_that_was_killed_has_what_it_confirmed_and_goes_on() {
    let mut server = server("");
    let sink = Arc::new(sink(&server));
    let subscription = subscribed(options(&server, &["orders"])).await;
    let (mut stored, mut seen) = (Vec::new(), Vec::new());
    for round in 0..6 {
        let messages: Vec<Message> = (0..200).map(|_| message("orders")).collect();
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
        let bound = Bound { messages: 100, bytes: usize::MAX };
        if let Ok(Ok(Arrival::Messages(received))) =
            tokio::time::timeout(Duration::from_millis(200), subscription.receive(bound)).await
        {
            seen.extend(ids(&received));
            let _ =
                subscription.settle(&received.iter().map(|one| (one.receipt, Answer::Ack)).collect::<Vec<_>>()).await;
        }
    }
    assert!(stored.len() >= 600, "{} were stored", stored.len());
    let there: Vec<String> = entries(&server.address(), "orders").await.into_iter().map(|entry| entry.id).collect();
    assert!(stored.iter().all(|id| there.contains(id)), "I1");
    let all = async {
        while !there.iter().all(|id| seen.contains(id)) {
            match subscription.receive(Bound { messages: 100, bytes: usize::MAX }).await {
                Ok(Arrival::Messages(received)) => seen.extend(ids(&received)),
                Ok(other) => panic!("{other:?}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    tokio::time::timeout(ARRIVES_WITHIN, all).await.expect("I1: what is there is received");
}

#[tokio::test]
async fn certificates_of_a_private_authority_are_verified_both_ways() {
    let ca = Authority::create(&scratch("authority"), "relay");
    let (certificate, key, root) = (ca.server.certificate.display(), ca.server.key.display(), ca.root.display());
    // On the port beside the plain one, which the tests ask.
    let tls = postroom_testkit::services::ports::free().unwrap();
    let _server = server(&format!(
        "tls-port {tls}\ntls-cert-file {certificate}\ntls-key-file {key}\ntls-ca-cert-file {root}\ntls-auth-clients yes"
    ));
    let checked = async |query: String| {
        let options = RedisOptions::new(format!("rediss://127.0.0.1:{tls}/0{query}"), "orders");
        options.check().await.map_err(|failed| failed.problem)
    };
    let (certificate, key) = (ca.client.certificate.display(), ca.client.key.display());
    let found = checked(format!("?cacertfile={root}&certfile={certificate}&keyfile={key}")).await.unwrap();
    assert!(found.contains("encrypted with TLS"), "{found}");
    assert!(checked(String::new()).await.unwrap_err().contains("cacertfile="));
    assert!(checked(format!("?cacertfile={root}")).await.is_err(), "without the client's certificate");
}
