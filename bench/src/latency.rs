//! From the commit to the broker's confirm, and what a business transaction pays.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use postroom::{BoxError, Message, MessageId, Outbox, Wake};
use postroom_postgres::Postgres;
use postroom_testkit::postgres::Database;
use tokio::sync::mpsc;
use tokio_postgres::Client;

use crate::measure::{Report, median, percentile};
use crate::{ours, setup};

/// One message a transaction, at an even rate; returns each one's time from commit to confirm, in milliseconds.
async fn measure(database: &Database, rate: u64, seconds: u64) -> Result<Vec<f64>, BoxError> {
    let (exchange, _audit) = setup::exchange().await;
    let (acked, acks) = mpsc::unbounded_channel();
    let run = ours::Run { acked: Some(acked), ..ours::Run::of(database.url()) };
    let relay = run.into_rabbitmq(&exchange).await?;
    of_relay(database, (relay, acks), rate, seconds).await
}

/// The same of a relay that runs, and tells what its broker has confirmed.
pub async fn of_relay(
    database: &Database,
    (mut relay, mut acks): (ours::Running, mpsc::UnboundedReceiver<(MessageId, Instant)>),
    rate: u64,
    seconds: u64,
) -> Result<Vec<f64>, BoxError> {
    tokio::time::sleep(Duration::from_secs(1)).await;
    let committed = write(database, rate, seconds, std::slice::from_ref(&relay.wake)).await?;
    relay.stored(committed.len()).await?;
    relay.stop().await?;
    let mut times = Vec::new();
    let mut committed: HashMap<MessageId, Instant> = committed.into_iter().collect();
    while let Ok((id, at)) = acks.try_recv() {
        if let Some(commit) = committed.remove(&id) {
            // A confirm may come before the writer's own commit has returned to it.
            times.push(at.saturating_duration_since(commit).as_secs_f64() * 1000.0);
        }
    }
    if committed.is_empty() {
        Ok(times)
    } else {
        Err(format!("{} messages were never confirmed", committed.len()).into())
    }
}

/// Writes one message a transaction at an even rate, and wakes the relays; returns when each was committed.
pub async fn write(
    database: &Database,
    rate: u64,
    seconds: u64,
    wakes: &[Wake],
) -> Result<Vec<(MessageId, Instant)>, BoxError> {
    let writers = rate.div_ceil(500).clamp(1, 8);
    let began = Instant::now();
    let tasks: Vec<_> = (0..writers)
        .map(|writer| {
            let (database, wakes) = (database.clone(), wakes.to_vec());
            tokio::spawn(async move {
                let mut client = database.connect().await;
                let mut committed: Vec<(MessageId, Instant)> = Vec::new();
                let total = rate * seconds / writers;
                for n in 0..total {
                    let due = began + Duration::from_secs_f64((n * writers + writer) as f64 / rate as f64);
                    tokio::time::sleep_until(due.into()).await;
                    let message = Message::new("orders", "order.placed", vec![b'x'; setup::PAYLOAD])
                        .key(format!("key-{}", n % 1000))
                        .routing_key("orders.placed");
                    let id = message.id;
                    let tx = client.transaction().await;
                    let mut tx = tx.map_err(BoxError::from)?;
                    Postgres.enqueue(&mut tx, &[message]).await.map_err(BoxError::from)?;
                    tx.commit().await.map_err(BoxError::from)?;
                    committed.push((id, Instant::now()));
                    wakes.iter().for_each(Wake::notify);
                }
                Ok::<_, BoxError>(committed)
            })
        })
        .collect();
    let mut committed = Vec::new();
    for task in tasks {
        committed.extend(task.await??);
    }
    Ok(committed)
}

/// At 100, 1,000 and 5,000 messages a second.
pub async fn by_rate(report: &mut Report) -> Result<(), BoxError> {
    let mut rows = Vec::new();
    for rate in [100, 1000, 5000] {
        let (database, _client) = setup::database().await?;
        let times = measure(&database, rate, 10).await?;
        rows.push((format!("{rate}/s: p50"), vec![percentile(&times, 0.5)]));
        rows.push((format!("{rate}/s: p99"), vec![percentile(&times, 0.99)]));
    }
    report.table("From commit to the broker's confirm, woken in process, durable commits", "ms", rows);
    report.note("one message a transaction; the writers share the two cores with PostgreSQL, RabbitMQ and the relay");
    Ok(())
}

/// With an unrelated transaction that holds a snapshot and a transaction id open all the time, and without.
pub async fn under_a_held_snapshot(report: &mut Report, seconds: u64, rounds: usize) -> Result<(), BoxError> {
    let (mut free, mut held) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        for hold in [false, true] {
            let (database, _client) = setup::database().await?;
            let other = database.connect().await;
            if hold {
                other
                    .batch_execute("begin isolation level repeatable read; select pg_current_xact_id(), count(*) from postroom.outbox")
                    .await?;
            }
            let times = measure(&database, 1000, seconds).await?;
            // The later half: the snapshot is old by then.
            let later = &times[times.len() / 2..];
            if hold { &mut held } else { &mut free }.push(percentile(later, 0.99));
        }
    }
    report.table(
        format!("p99 from commit to confirm at 1000/s, over {seconds} s"),
        "ms",
        vec![("nothing held".to_owned(), free), ("a snapshot held all the time".to_owned(), held)],
    );
    Ok(())
}

/// What enqueueing adds to a business transaction.
pub async fn of_business_transactions(report: &mut Report, rounds: usize) -> Result<(), BoxError> {
    const TRANSACTIONS: usize = 1500;
    let (database, client) = setup::database().await?;
    client
        .batch_execute(
            "create table accounts (id int primary key, balance bigint not null);
             insert into accounts select n, 0 from generate_series(1, 1000) n;
             create table payments (id bigint generated always as identity primary key, account int not null, amount bigint not null);",
        )
        .await?;
    let mut client = database.connect().await;
    let mut rows: Vec<(String, Vec<f64>)> = ["without a message", "with one message", "with ten messages in one call"]
        .iter()
        .map(|name| ((*name).to_owned(), Vec::new()))
        .collect();
    for _ in 0..rounds.max(5) {
        for (index, messages) in [0, 1, 10].into_iter().enumerate() {
            let mut times = Vec::new();
            for n in 0..TRANSACTIONS {
                times.push(pay(&mut client, n, messages).await?);
            }
            rows[index].1.push(median(&times));
        }
    }
    report.table("A business transaction: update, insert, durable commit; one connection", "ms, median", rows);
    Ok(())
}

async fn pay(client: &mut Client, n: usize, messages: usize) -> Result<f64, BoxError> {
    let began = Instant::now();
    let mut tx = client.transaction().await?;
    let account = (n % 1000 + 1) as i32;
    tx.execute("update accounts set balance = balance + 5 where id = $1", &[&account]).await?;
    tx.execute("insert into payments (account, amount) values ($1, 5)", &[&account]).await?;
    if messages > 0 {
        let messages: Vec<Message> = (0..messages)
            .map(|_| {
                Message::new("payments", "payment.taken", vec![b'x'; setup::PAYLOAD]).key(format!("account-{account}"))
            })
            .collect();
        Postgres.enqueue(&mut tx, &messages).await?;
    }
    tx.commit().await?;
    Ok(began.elapsed().as_secs_f64() * 1000.0)
}
