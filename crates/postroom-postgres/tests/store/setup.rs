//! What these tests begin with.

use std::time::Duration;

use postroom::{Delivery, MessageId, Outcome, Report, Settlement, Source, Standing, Token, TopicFilter, Want};
use postroom_postgres::{Connector, LogSource, LogSourceOptions, StartAt, migrate};
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

pub fn options(owner: &str) -> LogSourceOptions {
    LogSourceOptions {
        route: ROUTE.to_owned(),
        topics: TopicFilter::all(),
        owner: owner.to_owned(),
        lease: Duration::from_secs(600),
        start_at: StartAt::Oldest,
        positions_every: Duration::ZERO,
        order: postroom::Order::Key,
        on_dead: postroom::OnDead::Skip,
    }
}

/// A source that holds all lanes.
pub async fn source(database: &Database, owner: &str) -> LogSource {
    source_with(database, options(owner)).await
}

pub async fn source_with(database: &Database, options: LogSourceOptions) -> LogSource {
    let source = LogSource::open(connector(database), options).await.unwrap();
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
