//! How fast a backlog drains.

use std::time::{Duration, Instant};

use postroom::{BoxError, Order};

use crate::measure::{Report, median};
use crate::ours::{self, Nowhere};
use crate::resources::{cpu, memory, wal};
use crate::{rivals, setup};

/// Slow rivals drain a tenth: their rate does not depend on it.
const SLOW_PART: usize = 10;

/// To RabbitMQ: postroom with strict order, a bare client, and the articles' algorithms.
pub async fn to_rabbitmq(report: &mut Report, messages: usize, rounds: usize) -> Result<(), BoxError> {
    let names = [
        "postroom, strict order per key",
        "postroom, pipelined order",
        "bare client from memory (the ceiling)",
        "article A as written",
        "article A scaled: 5 workers, SKIP LOCKED, batch update",
        "article D as written",
    ];
    let mut rates: Vec<(String, Vec<f64>)> = names.iter().map(|name| ((*name).to_owned(), Vec::new())).collect();
    let (mut costs, mut wals, mut inverted) = (Vec::new(), Vec::new(), 0);
    for round in 0..rounds {
        eprintln!("drain to RabbitMQ: round {} of {rounds}", round + 1);
        for (index, order) in [(0, Order::Key), (1, Order::Pipelined)] {
            let (database, client) = setup::database().await?;
            setup::fill(&client, messages).await?;
            let (exchange, audit) = setup::exchange().await;
            let run = ours::Run { order, ..ours::Run::of(database.url()) };
            let (began, cpu_before, wal_before) = (Instant::now(), cpu(), wal(&client).await?);
            let mut relay = run.into_rabbitmq(&exchange).await?;
            relay.stored(messages).await?;
            let took = began.elapsed();
            relay.stop().await?;
            if index == 0 {
                costs.push((cpu() - cpu_before).as_secs_f64() * 1e6 / messages as f64);
                wals.push((wal(&client).await? - wal_before) / messages as f64);
            }
            if setup::gate(&audit, messages).await? > 0 {
                return Err("postroom inverted the order within a key".into());
            }
            rates[index].1.push(messages as f64 / took.as_secs_f64());
        }
        let (exchange, audit) = setup::exchange().await;
        let took = rivals::bare_client(&exchange, messages).await?;
        setup::gate(&audit, messages).await?;
        rates[2].1.push(messages as f64 / took.as_secs_f64());

        let few = messages / SLOW_PART;
        let (exchange, audit) = setup::exchange().await;
        let took = rivals::article_a(&exchange, few).await?;
        setup::gate(&audit, few).await?;
        rates[3].1.push(few as f64 / took.as_secs_f64());

        let (exchange, audit) = setup::exchange().await;
        let took = rivals::article_a_scaled(&exchange, messages).await?;
        inverted += setup::gate(&audit, messages).await?;
        rates[4].1.push(messages as f64 / took.as_secs_f64());

        let (exchange, audit) = setup::exchange().await;
        let took = rivals::article_d(&exchange, few).await?;
        setup::gate(&audit, few).await?;
        rates[5].1.push(few as f64 / took.as_secs_f64());
    }
    report.table(format!("Drain of {messages} messages of {} bytes to RabbitMQ", setup::PAYLOAD), "messages/s", rates);
    report.note(format!("postroom: {:.1} µs of processor time and {:.0} bytes of WAL a message for the relay, {:.0} MiB resident for the whole bench", median(&costs), median(&wals), memory()));
    report.note(format!(
        "gate: nothing lost or repeated; order within keys kept, except that A scaled inverted it {inverted} times"
    ));
    report.note(format!(
        "slow rivals drained {} messages; article A's job runs without its pauses",
        messages / SLOW_PART
    ));
    Ok(())
}

/// To a sink that takes everything at once: what the store and the engine can do.
pub async fn to_nowhere(report: &mut Report, messages: usize, rounds: usize) -> Result<(), BoxError> {
    let (mut strict, mut costs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (database, client) = setup::database().await?;
        setup::fill(&client, messages).await?;
        let began = Instant::now();
        let cpu_before = cpu();
        let mut relay = ours::Run { in_flight_max: 8000, ..ours::Run::of(database.url()) }.start(Nowhere).await?;
        relay.stored(messages).await?;
        strict.push(messages as f64 / began.elapsed().as_secs_f64());
        costs.push((cpu() - cpu_before).as_secs_f64() * 1e6 / messages as f64);
        let summary = relay.stop().await?;
        if summary.counters.stored as usize != messages {
            return Err(format!("{messages} messages, {} stored", summary.counters.stored).into());
        }
        client.batch_execute("truncate postroom.outbox").await?;
    }
    report.table(
        format!("Drain of {messages} messages to the null sink, 8000 in flight"),
        "messages/s",
        vec![("postroom, strict order per key".to_owned(), strict)],
    );
    report.note(format!(
        "{:.1} µs of processor time a message in the relay; the rest of the two cores is PostgreSQL",
        median(&costs)
    ));
    Ok(())
}

/// One message in a hundred cannot be delivered; those are on ten keys, and only those keys wait.
pub async fn with_poison(report: &mut Report, messages: usize, rounds: usize) -> Result<(), BoxError> {
    let (mut clean, mut poisoned) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        for poison in [false, true] {
            let (database, client) = setup::database().await?;
            let sql = "insert into postroom.outbox (topic, type, payload, key, routing_key)
                       select 'orders', 'order.placed', convert_to(rpad('{\"n\": ' || n || ', \"text\": \"', 198, 'x') || '\"}', 'UTF8'),
                              case when n % 100 = 0 then 'bad-' || n / 100 % 10 else 'key-' || n % 990 end,
                              case when n % 100 = 0 and $2 then 'nowhere' else 'orders.placed' end
                         from generate_series(1, $1::bigint) n";
            client.execute(sql, &[&(messages as i64), &poison]).await?;
            client.batch_execute("analyze; checkpoint").await?;
            let (exchange, _audit) = setup::exchange().await;
            let expected = if poison { messages - messages / 100 } else { messages };
            let began = Instant::now();
            let mut relay = ours::Run::of(database.url()).into_rabbitmq(&exchange).await?;
            relay.stored(expected).await?;
            let rate = expected as f64 / began.elapsed().as_secs_f64();
            if poison { &mut poisoned } else { &mut clean }.push(rate);
            relay.stop().await?;
            if poison {
                let sql = "select count(*) filter (where ordering_key not like 'bad-%'), count(*) from postroom.parked";
                let row = client.query_one(sql, &[]).await?;
                let (others, all): (i64, i64) = (row.get(0), row.get(1));
                let dead: i64 = client.query_one("select count(*) from postroom.dead_letters", &[]).await?.get(0);
                if others > 0 || (all + dead) as usize != messages / 100 {
                    return Err(format!("{all} parked, {others} of them of good keys, {dead} dead").into());
                }
            }
        }
    }
    report.table(
        format!("Good messages among {messages}, 1000 keys"),
        "messages/s",
        vec![
            ("nothing fails".to_owned(), clean),
            ("one in a hundred is undeliverable, on ten keys".to_owned(), poisoned),
        ],
    );
    Ok(())
}

/// Writers and the relay at once, as fast as both can.
pub async fn steady(report: &mut Report, rounds: usize) -> Result<(), BoxError> {
    const SECONDS: u64 = 10;
    let (mut produced, mut acked) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (database, _client) = setup::database().await?;
        let (exchange, audit) = setup::exchange().await;
        let mut relay = ours::Run::of(database.url()).into_rabbitmq(&exchange).await?;
        let until = Instant::now() + Duration::from_secs(SECONDS);
        let mut writers = Vec::new();
        for writer in 0..4 {
            let (client, wake) = (database.connect().await, relay.wake.clone());
            writers.push(tokio::spawn(async move { write_until(client, writer, until, &wake).await }));
        }
        let mut written = 0;
        for writer in writers {
            written += writer.await??;
        }
        let seen = relay.stored_now();
        produced.push(written as f64 / SECONDS as f64);
        acked.push(seen as f64 / SECONDS as f64);
        relay.stored(written).await?;
        relay.stop().await?;
        let held = audit.drain().await.len();
        if held != written {
            return Err(format!("{written} written, the broker has {held}").into());
        }
    }
    report.table(
        "Writing and relaying at once: 4 writers, 10 messages a transaction, durable commits",
        "messages/s",
        vec![("committed".to_owned(), produced), ("acked in the same time".to_owned(), acked)],
    );
    Ok(())
}

async fn write_until(
    client: tokio_postgres::Client,
    writer: u64,
    until: Instant,
    wake: &postroom::Wake,
) -> Result<usize, tokio_postgres::Error> {
    let sql = "insert into postroom.outbox (topic, type, payload, key, routing_key)
               select 'orders', 'order.placed', convert_to(repeat('x', 200), 'UTF8'), 'key-' || $1::bigint || '-' || n, 'orders.placed'
                 from generate_series(1, 10) n";
    let statement = client.prepare(sql).await?;
    let mut written = 0;
    while Instant::now() < until {
        client.execute(&statement, &[&(writer as i64)]).await?;
        wake.notify();
        written += 10;
    }
    Ok(written)
}
