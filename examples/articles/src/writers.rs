//! Writers in the manner of the articles: a business row and a row of the article's table, in one transaction. They know nothing of postroom. A tenth of
//! the transactions roll back.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Params, TxOpts};
use postroom::{BoxError, MessageId, Shards};
use tokio_postgres::{Client, NoTls};
use uuid::Uuid;

use crate::ledger::Committed;

const KEYS: u64 = 50;
/// MariaDB's and MySQL's number for it.
const DEADLOCK: u16 = 1213;

/// What one writer committed, and how many of its messages were rolled back.
pub type Wrote = (Committed, usize);

/// A number that looks like chance, and is the same in each run.
fn chance(seed: u64, step: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    (seed, step).hash(&mut hasher);
    hasher.finish()
}

/// Until so many messages are committed by all writers together. `insert` writes the article's row: $1 the id, $2 the key, $3 its number.
pub async fn postgres(
    url: String,
    insert: &'static str,
    seed: u64,
    until: usize,
    all: Arc<AtomicUsize>,
) -> Result<Wrote, String> {
    let told = |error: tokio_postgres::Error| format!("a writer failed: {error}");
    let (mut client, connection) = tokio_postgres::connect(&url, NoTls).await.map_err(told)?;
    tokio::spawn(connection);
    let (mut committed, mut rolled_back) = (Committed::new(), 0);
    for step in 0.. {
        if all.load(Ordering::Relaxed) >= until {
            break;
        }
        let chosen = chance(seed, step);
        let (key, id) = (format!("order-{}", chosen % KEYS), *MessageId::new().as_uuid());
        let n = order_and_message(&mut client, insert, (&key, id), chosen % 1_000 < 100).await.map_err(told)?;
        match n {
            Some(n) => {
                committed.insert(id, (key, n));
                all.fetch_add(1, Ordering::Relaxed);
            }
            None => rolled_back += 1,
        }
    }
    Ok((committed, rolled_back))
}

/// The business row first, so that its lock decides the order. None: rolled back.
async fn order_and_message(
    client: &mut Client,
    insert: &str,
    (key, id): (&str, Uuid),
    fails: bool,
) -> Result<Option<i64>, tokio_postgres::Error> {
    let tx = client.transaction().await?;
    let sql = "insert into orders as o values ($1, 1) on conflict (key) do update set n = o.n + 1 returning n";
    let n: i64 = tx.query_one(sql, &[&key]).await?.get(0);
    tx.execute(insert, &[&id, &key, &n]).await?;
    if fails {
        tx.rollback().await?;
        return Ok(None);
    }
    tx.commit().await?;
    Ok(Some(n))
}

/// The third article's: the database of the user, his award and a task, in one transaction.
pub async fn tasks(
    urls: [(String, String); 2],
    seed: u64,
    until: usize,
    all: Arc<AtomicUsize>,
) -> Result<Wrote, String> {
    let told = |error: BoxError| format!("a writer failed: {error}");
    let mut connected = Vec::new();
    for (name, url) in urls {
        let opts = postroom_mysql::options_of(&url).map_err(|error| told(error.into()))?;
        let conn = Conn::new(opts).await.map_err(|error| told(error.into()))?;
        connected.push((name, tokio::sync::Mutex::new(conn)));
    }
    // As its router does: the upper half of the hash on the lower one, and as many of its bits as there are databases.
    let router = |user: &str| {
        let hash = user.bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(u32::from(byte)));
        format!("exec_db0{}", 1 + ((hash ^ (hash >> 16)) & 1))
    };
    let shards = Shards::by_function(connected, router).map_err(|error| told(error.into()))?;
    let (mut committed, mut rolled_back) = (Committed::new(), 0);
    for step in 0.. {
        if all.load(Ordering::Relaxed) >= until {
            break;
        }
        let chosen = chance(seed, step);
        let (user, id) = (format!("user-{}", chosen % KEYS), *MessageId::new().as_uuid());
        let (_, conn) = shards.of(&user).map_err(|error| told(error.into()))?;
        let mut conn = conn.lock().await;
        // Two that wait for the first row of a user, whose writer rolls back, meet a deadlock: InnoDB leaves both of them a lock on the gap. As an
        // application has to, we make the transaction again.
        let awarded = loop {
            match award(&mut conn, &user, id, chosen % 1_000 < 100).await {
                Err(mysql_async::Error::Server(error)) if error.code == DEADLOCK => {}
                awarded => break awarded,
            }
        };
        match awarded.map_err(|error| told(error.into()))? {
            Some(n) => {
                committed.insert(id, (user, n));
                all.fetch_add(1, Ordering::Relaxed);
            }
            None => rolled_back += 1,
        }
    }
    Ok((committed, rolled_back))
}

async fn award(conn: &mut Conn, user: &str, id: Uuid, fails: bool) -> Result<Option<i64>, mysql_async::Error> {
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    let sql = "insert into user_award values (?, 1) on duplicate key update n = n + 1";
    tx.exec_drop(sql, (user,)).await?;
    let n: i64 = tx.exec_first("select n from user_award where user_id = ?", (user,)).await?.unwrap_or_default();
    let message = serde_json::json!({ "key": user, "n": n }).to_string();
    let sql = "insert into task (user_id, topic, message_id, message, state) values (?, 'send_award', ?, ?, 'create')";
    let parameters: Params = (user, id.to_string(), message).into();
    tx.exec_drop(sql, parameters).await?;
    if fails {
        tx.rollback().await?;
        return Ok(None);
    }
    tx.commit().await?;
    Ok(Some(n))
}

/// The fourth article's on SQL Server. `insert` writes the article's row: @P1 the id, @P2 the key, @P3 its number, @P4 the payload.
pub async fn mssql(
    url: String,
    insert: &'static str,
    seed: u64,
    until: usize,
    all: Arc<AtomicUsize>,
) -> Result<Wrote, String> {
    let told = |error: BoxError| format!("a writer failed: {error}");
    let settings = postroom_mssql::settings_of(&url).map_err(|error| told(error.into()))?;
    let mut conn = postroom_mssql::connect(&settings).await.map_err(|error| told(error.into()))?;
    let (mut committed, mut rolled_back) = (Committed::new(), 0);
    for step in 0.. {
        if all.load(Ordering::Relaxed) >= until {
            break;
        }
        let chosen = chance(seed, step);
        let (key, id) = (format!("order-{}", chosen % KEYS), *MessageId::new().as_uuid());
        match order(&mut conn, insert, (&key, id), chosen % 1_000 < 100).await.map_err(told)? {
            Some(n) => {
                committed.insert(id, (key, n));
                all.fetch_add(1, Ordering::Relaxed);
            }
            None => rolled_back += 1,
        }
    }
    Ok((committed, rolled_back))
}

async fn order(
    conn: &mut postroom_mssql::Conn,
    insert: &str,
    (key, id): (&str, Uuid),
    fails: bool,
) -> Result<Option<i64>, BoxError> {
    let driver = conn.driver();
    driver.simple_query("begin transaction").await?.into_results().await?;
    // A key that is new to two writers at once is a violation for one of them, which begins again.
    if driver.execute("update orders set n = n + 1 where [key] = @P1", &[&key]).await?.total() == 0 {
        let inserted = driver.execute("insert into orders ([key], n) values (@P1, 1)", &[&key]).await;
        if inserted.is_err() {
            driver.simple_query("if @@trancount > 0 rollback transaction").await?.into_results().await?;
            return Ok(None);
        }
    }
    let row = driver.query("select n from orders where [key] = @P1", &[&key]).await?.into_row().await?;
    let n: i64 = row.and_then(|row| row.get(0)).ok_or("the order is gone")?;
    let payload = serde_json::json!({ "key": key, "n": n }).to_string();
    driver.execute(insert, &[&id.to_string(), &key, &n, &payload]).await?;
    let end = if fails { "if @@trancount > 0 rollback transaction" } else { "commit transaction" };
    driver.simple_query(end).await?.into_results().await?;
    Ok((!fails).then_some(n))
}
