//! Draining to other brokers than RabbitMQ, beside a bare client that publishes the same bytes with the same guarantees from memory.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use postroom::{BoxError, MessageId, Sink, Wake};
use postroom_brokers::nats::{NatsOptions, NatsSink};
use postroom_brokers::redis::{RedisOptions, RedisSink};
use postroom_testkit::nats::AuditStream;
use postroom_testkit::redis::entries;
use postroom_testkit::services::{NatsServer, RedisServer};
use postroom_testkit::surroundings;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::{Semaphore, mpsc};

use crate::measure::{Report, percentile};
use crate::rivals::body;
use crate::{latency, ours, setup};

/// What a batch of the sink has, and how many of them are under way.
const REDIS: (usize, usize) = (500, 4);
const NATS: (usize, usize) = (250, 4);

/// Each broker in turn, in one run.
pub async fn drain(report: &mut Report, messages: usize, rounds: usize) -> Result<(), BoxError> {
    to_redis(report, messages, rounds).await?;
    to_jetstream(report, messages, rounds).await?;
    #[cfg(feature = "kafka")]
    kafka::drain(report, messages, rounds).await?;
    Ok(())
}

/// From the commit to the confirm, at a thousand messages a second, and while one of three brokers is away.
pub async fn latency(report: &mut Report) -> Result<(), BoxError> {
    let dir = surroundings::scratch("bench-redis");
    let redis = tokio::task::spawn_blocking(move || RedisServer::start(&dir, "")).await??;
    let dir = surroundings::scratch("bench-nats");
    let nats = tokio::task::spawn_blocking(move || NatsServer::start(&dir, "")).await??;
    let mut rows = Vec::new();
    let mut add = |name: &str, times: &[f64]| {
        rows.push((format!("{name}: p50"), vec![percentile(times, 0.5)]));
        rows.push((format!("{name}: p99"), vec![percentile(times, 0.99)]));
    };
    let sink = RedisSink::new(RedisOptions::new(redis.url(), "latency"))?;
    add("Redis, appendfsync always", &at_a_thousand(sink).await?);
    AuditStream::create(&nats.address(), "LATENCY", &["orders.>"], json!({})).await;
    let sink = NatsSink::new(NatsOptions::new(nats.url(), "LATENCY"))?;
    add("JetStream", &at_a_thousand(sink).await?);
    #[cfg(feature = "kafka")]
    {
        let (_server, sink) = kafka::sink().await?;
        add("Kafka, acks=all", &at_a_thousand(sink).await?);
    }
    report.table("From commit to the broker's confirm at 1000/s, woken in process, durable commits", "ms", rows);
    one_down(report, redis, &nats).await
}

async fn at_a_thousand(sink: impl Sink + 'static) -> Result<Vec<f64>, BoxError> {
    let (database, _client) = setup::database().await?;
    let (acked, acks) = mpsc::unbounded_channel();
    let relay = ours::Run { acked: Some(acked), ..ours::Run::of(database.url()) }.start(sink).await?;
    latency::of_relay(&database, (relay, acks), 1_000, 10).await
}

/// One outbox to three brokers, of which Redis is killed for a minute.
async fn one_down(report: &mut Report, mut redis: RedisServer, nats: &NatsServer) -> Result<(), BoxError> {
    const RATE: u64 = 300;
    const BEFORE: u64 = 20;
    const DOWN: u64 = 60;
    let (database, _client) = setup::database().await?;
    let (exchange, audit) = setup::exchange().await;
    let stream = AuditStream::create(&nats.address(), "FAN", &["fan"], json!({})).await;
    let (to_rabbitmq, rabbitmq_acks) = mpsc::unbounded_channel();
    let (to_nats, nats_acks) = mpsc::unbounded_channel();
    let run = |route: &'static str, acked| ours::Run { route, acked, ..ours::Run::of(database.url()) };
    let mut relays = vec![run("rabbitmq", Some(to_rabbitmq)).into_rabbitmq(&exchange).await?];
    let mut options = NatsOptions::new(nats.url(), "FAN");
    options.subject = "fan".to_owned();
    relays.push(run("nats", Some(to_nats)).start(NatsSink::new(options)?).await?);
    relays.push(run("redis", None).start(RedisSink::new(RedisOptions::new(redis.url(), "fan"))?).await?);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let wakes: Vec<Wake> = relays.iter().map(|relay| relay.wake.clone()).collect();
    let began = Instant::now();
    let kill = async {
        tokio::time::sleep(Duration::from_secs(BEFORE)).await;
        redis.kill()?;
        tokio::time::sleep(Duration::from_secs(DOWN)).await;
        redis.start_again()?;
        Ok::<_, BoxError>(())
    };
    let (committed, ()) = tokio::try_join!(latency::write(&database, RATE, BEFORE + DOWN, &wakes), kill)?;
    for mut relay in relays {
        relay.stored(committed.len()).await?;
        relay.stop().await?;
    }
    let committed: HashMap<MessageId, Instant> = committed.into_iter().collect();
    let mut rows = Vec::new();
    for (name, mut acks) in [("RabbitMQ", rabbitmq_acks), ("JetStream", nats_acks)] {
        let (mut up, mut down) = (Vec::new(), Vec::new());
        while let Ok((id, at)) = acks.try_recv() {
            let Some(commit) = committed.get(&id) else { continue };
            let ms = at.saturating_duration_since(*commit).as_secs_f64() * 1000.0;
            let is_up = commit.saturating_duration_since(began).as_secs() < BEFORE;
            if is_up { &mut up } else { &mut down }.push(ms);
        }
        rows.push((format!("{name}: all three up"), vec![percentile(&up, 0.99)]));
        rows.push((format!("{name}: while Redis is away"), vec![percentile(&down, 0.99)]));
    }
    let all = committed.len();
    let there = (audit.drain().await.len(), stream.all().await.len(), entries(&redis.address(), "fan").await.len());
    if there.0 != all || there.1 != all || there.2 < all {
        return Err(format!("{all} messages, and the brokers have {there:?}").into());
    }
    report.table(
        format!("p99 from commit to confirm at {RATE}/s, one outbox to three brokers, Redis killed for {DOWN} s"),
        "ms",
        rows,
    );
    report.note("gate: each broker has every message in the end; RabbitMQ and JetStream exactly once");
    Ok(())
}

/// postroom's own rate.
async fn ours(messages: usize, sink: impl Sink + 'static) -> Result<f64, BoxError> {
    let (database, client) = setup::database().await?;
    setup::fill(&client, messages).await?;
    let began = Instant::now();
    let mut relay = ours::Run::of(database.url()).start(sink).await?;
    relay.stored(messages).await?;
    let took = began.elapsed();
    relay.stop().await?;
    Ok(messages as f64 / took.as_secs_f64())
}

fn table(report: &mut Report, title: String, ours: Vec<f64>, bare: Vec<f64>) {
    let rows = vec![
        ("postroom, strict order per key".to_owned(), ours),
        ("bare client from memory (the ceiling)".to_owned(), bare),
    ];
    report.table(title, "messages/s", rows);
    report.note("gate: nothing lost or repeated; postroom keeps the order within keys".to_owned());
}

async fn to_redis(report: &mut Report, messages: usize, rounds: usize) -> Result<(), BoxError> {
    let dir = surroundings::scratch("bench-redis");
    let server = tokio::task::spawn_blocking(move || RedisServer::start(&dir, "")).await??;
    let (mut own, mut bare) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        eprintln!("drain to Redis: round {} of {rounds}", round + 1);
        let stream = format!("ours-{round}");
        own.push(ours(messages, RedisSink::new(RedisOptions::new(server.url(), stream.as_str()))?).await?);
        let there = entries(&server.address(), &stream).await;
        if setup::judge(there.iter().map(|entry| entry.payload.as_slice()), messages)? > 0 {
            return Err("postroom inverted the order within a key".into());
        }
        let stream = format!("bare-{round}");
        let took = bare_redis(&server.address(), &stream, messages).await?;
        let there = entries(&server.address(), &stream).await;
        setup::judge(there.iter().map(|entry| entry.payload.as_slice()), messages)?;
        bare.push(messages as f64 / took.as_secs_f64());
    }
    let title =
        format!("Drain of {messages} messages of {} bytes to a Redis stream, appendfsync always", setup::PAYLOAD);
    table(report, title, own, bare);
    Ok(())
}

/// Counts what comes back, and lets as much more be sent.
async fn count(
    from: OwnedReadHalf,
    expected: usize,
    is_answer: fn(&[u8]) -> bool,
    turns: &Semaphore,
    batch: usize,
) -> Result<(), BoxError> {
    let (mut from, mut line, mut seen) = (BufReader::with_capacity(64 << 10, from), Vec::new(), 0);
    while seen < expected {
        line.clear();
        if from.read_until(b'\n', &mut line).await? == 0 {
            return Err("the server has ended the connection".into());
        }
        if line.starts_with(b"-") || line.starts_with(b"{\"error\"") {
            return Err(String::from_utf8_lossy(&line).into_owned().into());
        }
        if is_answer(&line) {
            seen += 1;
            if seen % batch == 0 {
                turns.add_permits(1);
            }
        }
    }
    Ok(())
}

/// Commands in pipelines of as many as the sink sends, as many of them under way.
async fn bare_redis(address: &str, stream: &str, messages: usize) -> Result<Duration, BoxError> {
    let batches = batches(messages, REDIS.0, |number, into| {
        let (id, body) = (MessageId::new().to_string(), body(number));
        let key = format!("key-{}", number % setup::KEYS);
        let arguments: [&[u8]; 15] = [
            b"XADD",
            stream.as_bytes(),
            b"*",
            b"postroom-id",
            id.as_bytes(),
            b"postroom-type",
            b"order.placed",
            b"content-type",
            b"application/json",
            b"postroom-topic",
            b"orders",
            b"postroom-key",
            key.as_bytes(),
            b"payload",
            &body,
        ];
        into.extend(format!("*{}\r\n", arguments.len()).as_bytes());
        for argument in arguments {
            into.extend(format!("${}\r\n", argument.len()).as_bytes());
            into.extend(argument);
            into.extend(b"\r\n");
        }
    });
    let tcp = TcpStream::connect(address).await?;
    tcp.set_nodelay(true)?;
    let (from, into) = tcp.into_split();
    pipelined(batches, from, into, messages, |line| line.starts_with(b"$"), REDIS).await
}

/// What is sent together.
fn batches(messages: usize, size: usize, write: impl Fn(usize, &mut Vec<u8>)) -> Vec<Vec<u8>> {
    let numbers: Vec<usize> = (1..=messages).collect();
    let batch = |numbers: &[usize]| {
        let mut bytes = Vec::new();
        numbers.iter().for_each(|number| write(*number, &mut bytes));
        bytes
    };
    numbers.chunks(size).map(batch).collect()
}

async fn pipelined(
    batches: Vec<Vec<u8>>,
    from: OwnedReadHalf,
    mut into: tokio::net::tcp::OwnedWriteHalf,
    messages: usize,
    is_answer: fn(&[u8]) -> bool,
    (size, under_way): (usize, usize),
) -> Result<Duration, BoxError> {
    let turns = Semaphore::new(under_way);
    let began = Instant::now();
    let send = async {
        for batch in batches {
            turns.acquire().await?.forget();
            into.write_all(&batch).await?;
        }
        Ok::<_, BoxError>(())
    };
    tokio::try_join!(send, count(from, messages, is_answer, &turns, size))?;
    Ok(began.elapsed())
}

async fn to_jetstream(report: &mut Report, messages: usize, rounds: usize) -> Result<(), BoxError> {
    let dir = surroundings::scratch("bench-nats");
    let server = tokio::task::spawn_blocking(move || NatsServer::start(&dir, "")).await??;
    let (mut own, mut bare) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        eprintln!("drain to JetStream: round {} of {rounds}", round + 1);
        let (name, subject) = (format!("OURS{round}"), format!("ours.{round}"));
        let stream = AuditStream::create(&server.address(), &name, &[&subject], json!({})).await;
        let mut options = NatsOptions::new(server.url(), name.as_str());
        options.subject = subject;
        own.push(ours(messages, NatsSink::new(options)?).await?);
        let there = stream.all().await;
        if setup::judge(there.iter().map(|stored| stored.payload.as_slice()), messages)? > 0 {
            return Err("postroom inverted the order within a key".into());
        }
        let (name, subject) = (format!("BARE{round}"), format!("bare.{round}"));
        let stream = AuditStream::create(&server.address(), &name, &[&subject], json!({})).await;
        let took = bare_nats(&server.address(), &name, &subject, messages).await?;
        let there = stream.all().await;
        setup::judge(there.iter().map(|stored| stored.payload.as_slice()), messages)?;
        bare.push(messages as f64 / took.as_secs_f64());
    }
    let title = format!(
        "Drain of {messages} messages of {} bytes to a stream of JetStream on disk, sync_interval as shipped",
        setup::PAYLOAD
    );
    table(report, title, own, bare);
    Ok(())
}

/// The bare protocol, with the id by which the stream recognises a message, and an acknowledgement for each.
async fn bare_nats(address: &str, stream: &str, subject: &str, messages: usize) -> Result<Duration, BoxError> {
    let batches = batches(messages, NATS.0, |number, into| {
        let body = body(number);
        let headers = format!(
            "NATS/1.0\r\nNats-Msg-Id: {}\r\nNats-Expected-Stream: {stream}\r\npostroom-type: order.placed\r\nContent-Type: application/json\r\n\
             postroom-topic: orders\r\npostroom-key: key-{}\r\n\r\n",
            MessageId::new(),
            number % setup::KEYS
        );
        let sizes = format!("{} {}", headers.len(), headers.len() + body.len());
        into.extend(format!("HPUB {subject} _INBOX.bare.{number} {sizes}\r\n{headers}").as_bytes());
        into.extend(&body);
        into.extend(b"\r\n");
    });
    let tcp = TcpStream::connect(address).await?;
    tcp.set_nodelay(true)?;
    let (mut from, mut into) = tcp.into_split();
    let mut greeting = vec![0; 8192];
    let _ = from.read(&mut greeting).await?;
    let hello = "CONNECT {\"verbose\":false,\"pedantic\":false,\"headers\":true,\"lang\":\"rust\",\"version\":\"0\",\"protocol\":1}\r\nSUB _INBOX.bare.* 1\r\n";
    into.write_all(hello.as_bytes()).await?;
    pipelined(batches, from, into, messages, |line| line.starts_with(b"MSG "), NATS).await
}

#[cfg(feature = "kafka")]
mod kafka {
    use futures_util::future::try_join_all;
    use postroom_brokers::kafka::{KafkaOptions, KafkaSink};
    use postroom_testkit::kafka::AuditTopic;
    use postroom_testkit::services::KafkaServer;
    use rdkafka::ClientConfig;
    use rdkafka::message::{Header, OwnedHeaders};
    use rdkafka::producer::{FutureProducer, FutureRecord};

    use super::*;

    const PARTITIONS: usize = 6;
    const UNDER_WAY: usize = 4_000;

    pub async fn drain(report: &mut Report, messages: usize, rounds: usize) -> Result<(), BoxError> {
        let dir = surroundings::scratch("bench-kafka");
        let server = tokio::task::spawn_blocking(move || KafkaServer::start(&dir, 0)).await??;
        let (mut own, mut bare) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            eprintln!("drain to Kafka: round {} of {rounds}", round + 1);
            let name = format!("ours-{round}");
            let topic = AuditTopic::create(&server.address(), &name, PARTITIONS, &[]).await;
            let mut options = KafkaOptions::new(format!("kafka://{}", server.address()));
            options.topic = name;
            own.push(ours(messages, KafkaSink::new(options)?).await?);
            let there = topic.read().await;
            if setup::judge(there.iter().filter_map(|stored| stored.payload.as_deref()), messages)? > 0 {
                return Err("postroom inverted the order within a key".into());
            }
            let name = format!("bare-{round}");
            let topic = AuditTopic::create(&server.address(), &name, PARTITIONS, &[]).await;
            let took = self::bare(&server.address(), &name, messages).await?;
            let there = topic.read().await;
            setup::judge(there.iter().filter_map(|stored| stored.payload.as_deref()), messages)?;
            bare.push(messages as f64 / took.as_secs_f64());
        }
        let title = format!(
            "Drain of {messages} messages of {} bytes to a topic of Kafka with {PARTITIONS} partitions, idempotent, acks=all",
            setup::PAYLOAD
        );
        table(report, title, own, bare);
        Ok(())
    }

    /// A server, and a sink to a topic of it.
    pub async fn sink() -> Result<(KafkaServer, KafkaSink), BoxError> {
        let dir = surroundings::scratch("bench-kafka");
        let server = tokio::task::spawn_blocking(move || KafkaServer::start(&dir, 0)).await??;
        AuditTopic::create(&server.address(), "latency", PARTITIONS, &[]).await;
        let mut options = KafkaOptions::new(format!("kafka://{}", server.address()));
        options.topic = "latency".to_owned();
        Ok((server, KafkaSink::new(options)?))
    }

    /// The client library alone, with a delivery report for each message.
    async fn bare(brokers: &str, topic: &str, messages: usize) -> Result<Duration, BoxError> {
        let producer: FutureProducer = ClientConfig::new()
            .set("bootstrap.servers", brokers)
            .set("broker.address.family", "v4")
            .set("enable.idempotence", "true")
            .set("linger.ms", "5")
            .create()?;
        let all: Vec<(String, String, Vec<u8>)> = (1..=messages)
            .map(|number| (MessageId::new().to_string(), format!("key-{}", number % setup::KEYS), body(number)))
            .collect();
        let began = Instant::now();
        for some in all.chunks(UNDER_WAY) {
            let sent = some.iter().map(|(id, key, body)| {
                let header = |key, value| Header { key, value: Some(value) };
                let headers = OwnedHeaders::new()
                    .insert(header("postroom-id", id.as_str()))
                    .insert(header("postroom-type", "order.placed"))
                    .insert(header("content-type", "application/json"))
                    .insert(header("postroom-topic", "orders"))
                    .insert(header("postroom-key", key.as_str()));
                let record = FutureRecord::to(topic).key(key.as_str()).payload(body).headers(headers);
                let sent = producer.send_result(record).map_err(|(error, _)| error);
                async move { Ok::<_, BoxError>(sent?.await?.map_err(|(error, _)| error)?) }
            });
            try_join_all(sent).await?;
        }
        Ok(began.elapsed())
    }
}
