//! Databases, exchanges and backlogs.

use postroom::BoxError;
use postroom_postgres::{Connector, migrate};
use postroom_testkit::postgres::Database;
use postroom_testkit::rabbitmq::AuditQueue;
use postroom_testkit::surroundings;
use tokio_postgres::Client;

/// Bytes of a payload.
pub const PAYLOAD: usize = 200;
pub const KEYS: usize = 5000;

/// A database with our schema.
pub async fn database() -> Result<(Database, Client), BoxError> {
    let database = Database::create().await;
    migrate(&Connector::new(database.url())?, 16).await?;
    let client = database.connect().await;
    Ok((database, client))
}

/// Tests want autovacuum once a second; figures are of a server that looks once a minute, as it comes.
pub async fn autovacuum_as_shipped() -> Result<(), BoxError> {
    let (client, connection) = tokio_postgres::connect(&surroundings::postgres_url(), tokio_postgres::NoTls).await?;
    let connection = tokio::spawn(connection);
    client.batch_execute("alter system set autovacuum_naptime = '1min'").await?;
    client.batch_execute("select pg_reload_conf()").await?;
    drop(client);
    Ok(connection.await??)
}

/// Appends messages to the outbox, all at once: the n-th has the key `key-(n mod KEYS)` and says n in its payload.
pub async fn fill(client: &Client, messages: usize) -> Result<(), BoxError> {
    let sql = "insert into postroom.outbox (topic, type, payload, key, routing_key)
               select 'orders', 'order.placed', convert_to(rpad('{\"n\": ' || n || ', \"text\": \"', $2 - 2, 'x') || '\"}', 'UTF8'),
                      'key-' || n % $3, 'orders.placed'
                 from generate_series(1, $1::bigint) n";
    let keys = KEYS as i64;
    client.execute(sql, &[&(messages as i64), &(PAYLOAD as i32), &keys]).await?;
    // Every rival begins with a settled server: what the filling left to do is done.
    client.batch_execute("vacuum (analyze)").await?;
    client.batch_execute("checkpoint").await?;
    Ok(())
}

/// An exchange of its own with a durable queue that keeps everything.
pub async fn exchange() -> (String, AuditQueue) {
    let exchange = format!("bench-{}", surroundings::unique());
    let audit = AuditQueue::bound(&surroundings::rabbitmq_url(), &exchange, "orders.#").await;
    (exchange, audit)
}

/// The gate: what the broker holds. Returns inversions within keys, where the order could be told.
pub async fn gate(audit: &AuditQueue, messages: usize) -> Result<usize, BoxError> {
    let stored = audit.drain().await;
    judge(stored.iter().map(|message| message.body.as_ref()), messages)
}

/// The same of payloads in the order in which a broker has them.
pub fn judge<'p>(stored: impl Iterator<Item = &'p [u8]>, messages: usize) -> Result<usize, BoxError> {
    let (mut newest, mut all) = (vec![0_usize; KEYS], 0);
    let (mut seen, mut inversions) = (std::collections::HashSet::with_capacity(messages), 0);
    for body in stored {
        all += 1;
        let body = String::from_utf8_lossy(body);
        let number = body.split(|c: char| !c.is_ascii_digit()).find(|part| !part.is_empty());
        let number: usize = number.ok_or("a message without its number")?.parse()?;
        seen.insert(number);
        let newest = &mut newest[number % KEYS];
        inversions += usize::from(number < *newest);
        *newest = number.max(*newest);
    }
    if seen.len() != messages || all != messages {
        return Err(format!("{messages} messages were sent; the broker has {} in {all} copies", seen.len()).into());
    }
    Ok(inversions)
}
