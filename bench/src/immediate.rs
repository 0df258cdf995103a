//! An embedded relay that the writer wakes after its commit, on each store: from the commit to the acknowledgement, beside one that polls.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mysql_async::{Conn, TxOpts};
use postroom::{BoxError, Message, MessageId, Outbox, Route, Source, Store, Wake};
use postroom_mysql::Mysql;
use postroom_postgres::Postgres;
use postroom_sqlite::Sqlite;
use postroom_testkit::services::MysqlServer;
use postroom_testkit::surroundings;
use rusqlite::TransactionBehavior;
use tokio::sync::mpsc;

use crate::measure::{Report, percentile};
use crate::{ours, setup};

const MESSAGES: usize = 1_000;
const EVERY: Duration = Duration::from_millis(10);

/// Writes one message a transaction.
enum Writer {
    Postgres(tokio_postgres::Client),
    Sqlite(rusqlite::Connection),
    Mysql(Conn),
}

impl Writer {
    /// Returns when its commit was.
    async fn write(&mut self, message: Message) -> Result<Instant, BoxError> {
        let messages = [message];
        match self {
            Self::Postgres(client) => {
                let mut tx = client.transaction().await?;
                Postgres.enqueue(&mut tx, &messages).await?;
                tx.commit().await?;
            }
            Self::Sqlite(connection) => {
                let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
                Sqlite.enqueue_blocking(&tx, &messages)?;
                tx.commit()?;
            }
            Self::Mysql(conn) => {
                let mut tx = conn.start_transaction(TxOpts::default()).await?;
                Mysql.enqueue(&mut tx, &messages).await?;
                tx.commit().await?;
            }
        }
        Ok(Instant::now())
    }
}

/// Milliseconds from each commit to its acknowledgement; an error if one message was not acknowledged, or twice.
async fn measure(source: Arc<dyn Source>, mut writer: Writer, is_woken: bool) -> Result<Vec<f64>, BoxError> {
    let (acked, mut acks) = mpsc::unbounded_channel();
    let mut relay = ours::relay(Route::new("bench"), source, ours::Nowhere, 2000, Some(acked));
    // It has its lanes when the first message is through.
    writer.write(Message::new("orders", "order.placed", "first")).await?;
    relay.stored(1).await?;
    let wake = if is_woken { relay.wake.clone() } else { Wake::new() };
    let mut committed: HashMap<MessageId, Instant> = HashMap::with_capacity(MESSAGES);
    let began = Instant::now();
    for n in 0..MESSAGES {
        tokio::time::sleep_until((began + EVERY * n as u32).into()).await;
        let message =
            Message::new("orders", "order.placed", vec![b'x'; setup::PAYLOAD]).key(format!("key-{}", n % 100));
        let id = message.id;
        committed.insert(id, writer.write(message).await?);
        wake.notify();
    }
    relay.stored(MESSAGES + 1).await?;
    relay.stop().await?;
    let mut times = Vec::with_capacity(MESSAGES);
    let mut first = 0;
    while let Ok((id, at)) = acks.try_recv() {
        match committed.remove(&id) {
            // An acknowledgement may come before the writer's own commit has returned to it.
            Some(commit) => times.push(at.saturating_duration_since(commit).as_secs_f64() * 1000.0),
            None => first += 1,
        }
    }
    match (committed.len(), first) {
        (0, 1) => Ok(times),
        (missing, more) => {
            Err(format!("{missing} messages were not acknowledged, {} more than once", more.max(1) - 1).into())
        }
    }
}

/// At 100 messages a second.
pub async fn on_each_store(report: &mut Report) -> Result<(), BoxError> {
    let dir = surroundings::scratch("bench-immediate");
    let data = dir.join("server");
    let server = tokio::task::spawn_blocking(move || MysqlServer::start(&data)).await??;
    let mut rows = Vec::new();
    for is_woken in [true, false] {
        let how = if is_woken { "woken" } else { "polls" };
        for store in ["PostgreSQL", "SQLite", "MariaDB"] {
            let route = Route::new("bench");
            let owner = surroundings::unique();
            let (source, writer) = match store {
                "PostgreSQL" => {
                    let (database, client) = setup::database().await?;
                    let source = postroom_postgres::Database::new(database.url())?.source(&route, &owner).await?;
                    (source, Writer::Postgres(client))
                }
                "SQLite" => {
                    let file = dir.join(format!("{how}.db"));
                    let mut connection = postroom_sqlite::connect(&file)?;
                    postroom_sqlite::migrate(&mut connection)?;
                    let source = postroom_sqlite::Database::new(&file).source(&route, &owner).await?;
                    (source, Writer::Sqlite(connection))
                }
                _ => {
                    let mut admin = Conn::new(postroom_mysql::options_of(&server.url("mysql"))?).await?;
                    mysql_async::prelude::Queryable::query_drop(&mut admin, format!("create database {how}")).await?;
                    let url = server.url(how);
                    let options = postroom_mysql::options_of(&url)?;
                    postroom_mysql::migrate(&options, Some(16)).await?;
                    let source = postroom_mysql::Database::new(&url)?.source(&route, &owner).await?;
                    (source, Writer::Mysql(Conn::new(options).await?))
                }
            };
            let times = measure(source, writer, is_woken).await?;
            for (name, part) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("longest", 1.0)] {
                rows.push((format!("{store}, {how}: {name}"), vec![percentile(&times, part)]));
            }
        }
    }
    report.table(
        "An embedded relay at 100/s: from the commit to the acknowledgement of a sink in the process",
        "ms",
        rows,
    );
    report.note("one message a transaction, durable commits; polls: a relay that nobody wakes looks every 200 ms, and oftener after it found something");
    Ok(())
}
