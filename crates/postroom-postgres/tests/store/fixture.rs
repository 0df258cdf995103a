//! A database of a test's own, as the suites want it.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Consumer, ConsumerStore, Message, MessageId, Operator, Outbox as _, Route, Session, Source};
use postroom_postgres::{
    Database as Store, LogSource, PostgresSession, Sqlx08Postgres, Sqlx08Session, SqlxPostgres, SqlxSession,
};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::consumer_store::Inbox;
use postroom_testkit::conformance::intake::Taking;
use postroom_testkit::conformance::operator::Operated;
use postroom_testkit::conformance::source::Outbox;
use postroom_testkit::postgres::Database;
use tokio_postgres::Client;

pub struct Postgres {
    database: Database,
    store: Store,
    client: tokio::sync::Mutex<Client>,
}

#[async_trait]
impl Fixture for Postgres {
    async fn create() -> Self {
        let database = Database::create().await;
        let store = Store::new(database.url()).unwrap();
        postroom_postgres::migrate(store.connector(), 4).await.unwrap();
        let client = database.connect().await;
        client
            .batch_execute(
                "create table shop_outbox (n bigint generated always as identity primary key, id text, topic text not null, body text, k text,
                                           status smallint not null default 0, at timestamptz not null default clock_timestamp(),
                                           sent_at timestamptz, error varchar(20));
                 create index on shop_outbox (status, at)",
            )
            .await
            .unwrap();
        Self { database, store, client: tokio::sync::Mutex::new(client) }
    }
}

impl Postgres {
    async fn run(&self, sql: &str) {
        self.client.lock().await.batch_execute(sql).await.unwrap();
    }

    /// Writes in a transaction that is open yet.
    async fn written(&self, messages: &[Message]) -> Client {
        let mut client = self.database.connect().await;
        let mut tx = client.transaction().await.unwrap();
        postroom_postgres::Postgres.enqueue(&mut tx, messages).await.unwrap();
        // Neither committed nor rolled back: the client keeps it.
        std::mem::forget(tx);
        client
    }
}

#[async_trait]
impl Outbox for Postgres {
    type Open = Client;

    async fn open(&self, route: &Route, owner: &str) -> Arc<dyn Source> {
        Arc::new(LogSource::open(&self.store, route, owner).await.unwrap().positions_every(Duration::ZERO))
    }

    async fn commit(&self, messages: &[Message]) {
        let mut client = self.client.lock().await;
        let mut tx = client.transaction().await.unwrap();
        postroom_postgres::Postgres.enqueue(&mut tx, messages).await.unwrap();
        tx.commit().await.unwrap();
    }

    async fn roll_back(&self, messages: &[Message]) {
        let mut client = self.client.lock().await;
        let mut tx = client.transaction().await.unwrap();
        postroom_postgres::Postgres.enqueue(&mut tx, messages).await.unwrap();
        tx.rollback().await.unwrap();
    }

    async fn begin(&self, messages: &[Message]) -> Option<Client> {
        Some(self.written(messages).await)
    }

    async fn end(&self, open: Client) {
        open.batch_execute("commit").await.unwrap();
    }

    async fn expire(&self) {
        self.run(
            "update postroom.lanes set expires_at = '-infinity'; update postroom.relays set expires_at = '-infinity'",
        )
        .await;
    }

    async fn make_due(&self) {
        self.run("update postroom.parked set due_at = clock_timestamp() - interval '1 hour' where state <> 'queued'")
            .await;
    }
}

#[async_trait]
impl Operated for Postgres {
    fn operator(&self) -> Arc<dyn Operator> {
        Arc::new(self.store.clone())
    }

    async fn audit(&self) -> Vec<(String, String, String, usize)> {
        let sql = "select actor, action, reason, cardinality(message_ids) from postroom.audit order by id";
        let rows = self.client.lock().await.query(sql, &[]).await.unwrap();
        let row = |row: &tokio_postgres::Row| (row.get(0), row.get(1), row.get(2), row.get::<_, i32>(3) as usize);
        rows.iter().map(row).collect()
    }

    async fn processed(&self, age: Duration, count: usize) {
        let sql = "insert into postroom.inbox (consumer, message_id, processed_at)
                   select 'totals', gen_random_uuid(), clock_timestamp() - $1 * interval '1 second'
                     from generate_series(1, $2)";
        self.client.lock().await.execute(sql, &[&age.as_secs_f64(), &(count as i32)]).await.unwrap();
    }

    async fn stepped_ago(&self, seconds: f64) {
        let sql =
            format!("update postroom.operations set stepped_at = clock_timestamp() - {seconds} * interval '1 second'");
        self.run(&sql).await;
    }

    async fn grow_older(&self, by: Duration) {
        for (table, column) in [
            ("dead_letters", "died_at"),
            ("dead_consume", "died_at"),
            ("audit", "at"),
            ("archive_segments", "taken_until"),
            ("archive_restored", "stays_until"),
        ] {
            let sql = format!("update postroom.{table} set {column} = {column} - $1 * interval '1 second'");
            self.client.lock().await.execute(&sql, &[&by.as_secs_f64()]).await.unwrap();
        }
    }
}

#[async_trait]
impl Taking for Postgres {
    type Held = Client;

    fn store(&self) -> Arc<dyn postroom::Store> {
        Arc::new(Store::new(self.database.url()).unwrap())
    }

    async fn run(&self, sql: &str) {
        self.client.lock().await.batch_execute(sql).await.unwrap();
    }

    async fn read(&self, sql: &str) -> Vec<Option<String>> {
        let sql = format!("select q.v::text from ({sql}) q (v)");
        self.client.lock().await.query(&sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
    }

    async fn hold(&self, sql: &str) -> Option<Client> {
        let client = self.database.connect().await;
        client.batch_execute(&format!("begin; {sql}")).await.unwrap();
        Some(client)
    }

    async fn let_go(&self, held: Client) {
        held.batch_execute("commit").await.unwrap();
    }

    async fn empty_outbox(&self) {
        Postgres::run(self, "delete from postroom.outbox").await;
    }
}

/// The inbox of a database through one driver.
pub struct Through<D> {
    database: Database,
    driver: PhantomData<D>,
}

pub trait Driver: Send + Sync {
    type Store: ConsumerStore;
    type Session: Session<Self::Store>;

    fn session(url: &str) -> Self::Session;
}

pub struct TokioPostgres;

impl Driver for TokioPostgres {
    type Store = postroom_postgres::Postgres;
    type Session = PostgresSession;

    fn session(url: &str) -> PostgresSession {
        PostgresSession::new(postroom_postgres::Connector::new(url).unwrap())
    }
}

pub struct Sqlx;

impl Driver for Sqlx {
    type Store = SqlxPostgres;
    type Session = SqlxSession;

    fn session(url: &str) -> SqlxSession {
        SqlxSession::new(sqlx::PgPool::connect_lazy(url).unwrap())
    }
}

pub struct Sqlx08;

impl Driver for Sqlx08 {
    type Store = Sqlx08Postgres;
    type Session = Sqlx08Session;

    fn session(url: &str) -> Sqlx08Session {
        Sqlx08Session::new(sqlx_postgres_08::PgPool::connect_lazy(url).unwrap())
    }
}

#[async_trait]
impl<D: Driver> Fixture for Through<D> {
    async fn create() -> Self {
        let database = Database::create().await;
        let store = Store::new(database.url()).unwrap();
        postroom_postgres::migrate(store.connector(), 4).await.unwrap();
        Self { database, driver: PhantomData }
    }
}

#[async_trait]
impl<D: Driver> Inbox for Through<D> {
    type Store = D::Store;
    type Session = D::Session;

    fn session(&self) -> D::Session {
        D::session(self.database.url())
    }

    async fn make_due(&self) {
        let client = self.database.connect().await;
        client
            .batch_execute("update postroom.inbox_messages set due_at = clock_timestamp() - interval '1 hour'")
            .await
            .unwrap();
    }

    async fn dead(&self, consumer: &Consumer) -> Vec<(MessageId, String, String)> {
        let sql = "select message_id, cause, error from postroom.dead_consume where consumer = $1 order by seq";
        let rows = self.database.connect().await.query(sql, &[&consumer.as_str()]).await.unwrap();
        rows.iter().map(|row| (row.get::<_, uuid::Uuid>(0).into(), row.get(1), row.get(2))).collect()
    }
}
