//! What these tests begin with.

use std::time::Duration;

use postroom::{Delivery, MessageId, Outcome, Report, Route, Settlement, Source, Standing, StoreError, Token, Want};
use postroom_postgres::{Connector, LogSource, migrate};
use postroom_testkit::postgres::Database;

pub const ROUTE: &str = "orders";

/// A database with our schema.
pub async fn prepared() -> Database {
    let database = Database::create().await;
    migrate(&connector(&database), 16).await.unwrap();
    database
}

pub fn connector(database: &Database) -> Connector {
    Connector::new(database.url()).unwrap()
}

/// The store that stands on it.
pub fn store(database: &Database) -> postroom_postgres::Database {
    postroom_postgres::Database::new(database.url()).unwrap()
}

pub fn route() -> Route {
    Route { lease: Duration::from_secs(600), ..Route::new(ROUTE) }
}

/// A source that holds nothing yet, and writes positions with every settling.
pub async fn open(database: &Database, route: &Route, owner: &str) -> Result<LogSource, StoreError> {
    LogSource::open(&store(database), route, owner).await.map(|source| source.positions_every(Duration::ZERO))
}

/// A source that holds all lanes.
pub async fn source(database: &Database, owner: &str) -> LogSource {
    source_of(database, &route(), owner).await
}

pub async fn source_of(database: &Database, route: &Route, owner: &str) -> LogSource {
    let source = open(database, route, owner).await.unwrap();
    renew(&source).await;
    source
}

/// A renewal that has nothing to report.
pub async fn renew(source: &LogSource) -> Standing {
    source.renew(&Report::default()).await.unwrap()
}

pub fn done(tokens: impl IntoIterator<Item = Token>) -> Vec<Settlement> {
    tokens.into_iter().map(|token| settled(token, Outcome::Done)).collect()
}

pub fn settled(token: Token, outcome: Outcome) -> Settlement {
    Settlement { token, outcome }
}

pub fn want(messages: usize) -> Want {
    Want { parked: false, ..Want::up_to(messages) }
}

/// Everything that is there now, not settled.
pub async fn claim_all(source: &LogSource) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    loop {
        let claimed = source.claim(Want::up_to(500)).await.unwrap();
        let empty = claimed.deliveries.is_empty() && !claimed.more;
        deliveries.extend(claimed.deliveries);
        if empty {
            return deliveries;
        }
    }
}

/// Everything that is there now, settled as done.
pub async fn drain(source: &LogSource) -> Vec<MessageId> {
    let deliveries = claim_all(source).await;
    source.settle(&done(deliveries.iter().map(|delivery| delivery.token))).await.unwrap();
    deliveries.into_iter().map(|delivery| delivery.message.id).collect()
}

/// Enqueues `count` messages of a key in a transaction each; returns their ids.
pub async fn enqueue(client: &tokio_postgres::Client, key: Option<&str>, count: usize) -> Vec<MessageId> {
    let mut ids = Vec::new();
    for _ in 0..count {
        let sql = "select postroom.enqueue('orders', 'order.placed', 'x'::text, key => $1)";
        let row = client.query_one(sql, &[&key]).await.unwrap();
        ids.push(MessageId::from(row.get::<_, uuid::Uuid>(0)));
    }
    ids
}
