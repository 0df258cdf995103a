//! A database of a test's own, on one server for all tests of the process.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, TxOpts};
use postroom::{Consumer, Message, MessageId, Operator, Outbox as _, Route, Source};
use postroom_mysql::{Database, Mysql, MysqlSession, MysqlSource, migrate, options_of};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::consumer_store::Inbox;
use postroom_testkit::conformance::intake::Taking;
use postroom_testkit::conformance::operator::Operated;
use postroom_testkit::conformance::source::Outbox;
use postroom_testkit::services::MysqlServer;
use postroom_testkit::surroundings;

/// It ends with the process.
static SERVER: LazyLock<MysqlServer> =
    LazyLock::new(|| MysqlServer::start(&surroundings::scratch("mariadb").join("server")).unwrap());

/// A database of the server that these tests are run on: a MariaDB of their own, or the one that `POSTROOM_TEST_MYSQL` names, such as
/// `mysql://root@127.0.0.1:3306`.
fn url_of(database: &str) -> String {
    std::env::var("POSTROOM_TEST_MYSQL").map_or_else(|_| SERVER.url(database), |server| format!("{server}/{database}"))
}

pub struct Shop {
    pub url: String,
    pub opts: Opts,
}

impl Shop {
    /// An empty database.
    pub async fn empty() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let server = tokio::task::spawn_blocking(|| url_of("mysql")).await.unwrap();
        let name = format!("t_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let mut admin = Conn::new(options_of(&server).unwrap()).await.unwrap();
        admin.query_drop(format!("create database {name}")).await.unwrap();
        let url = url_of(&name);
        Self { opts: options_of(&url).unwrap(), url }
    }

    pub async fn connect(&self) -> Conn {
        Conn::new(self.opts.clone()).await.unwrap()
    }

    pub async fn run(&self, sql: &str) {
        self.connect().await.query_drop(sql).await.unwrap();
    }

    /// Writes in a transaction that is open yet.
    pub async fn written(&self, messages: &[Message]) -> Conn {
        let mut conn = self.connect().await;
        let mut tx = conn.start_transaction(TxOpts::default()).await.unwrap();
        Mysql.enqueue(&mut tx, messages).await.unwrap();
        // Neither committed nor rolled back: the connection keeps it.
        std::mem::forget(tx);
        conn
    }
}

#[async_trait]
impl Fixture for Shop {
    async fn create() -> Self {
        let shop = Self::empty().await;
        migrate(&shop.opts, Some(4)).await.unwrap();
        shop.run(
            "create table shop_outbox (n bigint not null auto_increment primary key, id varchar(64), topic varchar(64) not null, body text, k varchar(64),
                                       status smallint not null default 0, at datetime(6) not null default (utc_timestamp(6)),
                                       sent_at datetime(6), error varchar(20), key (status, at))",
        )
        .await;
        shop
    }
}

#[async_trait]
impl Outbox for Shop {
    type Open = Conn;

    async fn open(&self, route: &Route, owner: &str) -> Arc<dyn Source> {
        Arc::new(MysqlSource::open(&self.opts, route, owner).await.unwrap().positions_every(Duration::ZERO))
    }

    async fn commit(&self, messages: &[Message]) {
        self.written(messages).await.query_drop("commit").await.unwrap();
    }

    async fn roll_back(&self, messages: &[Message]) {
        self.written(messages).await.query_drop("rollback").await.unwrap();
    }

    async fn begin(&self, messages: &[Message]) -> Option<Conn> {
        Some(self.written(messages).await)
    }

    async fn end(&self, mut open: Conn) {
        open.query_drop("commit").await.unwrap();
    }

    async fn expire(&self) {
        self.run("update postroom_lanes set expires_at = '1970-01-02'").await;
        self.run("update postroom_relays set expires_at = '1970-01-02'").await;
    }

    async fn make_due(&self) {
        self.run("update postroom_parked set due_at = utc_timestamp(6) - interval 1 hour where state <> 'queued'")
            .await;
    }
}

#[async_trait]
impl Operated for Shop {
    fn operator(&self) -> Arc<dyn Operator> {
        Arc::new(Database::new(&self.url).unwrap())
    }

    async fn audit(&self) -> Vec<(String, String, String, usize)> {
        let sql = "select actor, action, reason, json_length(message_ids) from postroom_audit order by id";
        self.connect().await.query(sql).await.unwrap()
    }

    async fn processed(&self, age: Duration, count: usize) {
        let mut conn = self.connect().await;
        for _ in 0..count {
            let sql = "insert into postroom_inbox (consumer, message_id, processed_at)
                       values ('totals', ?, timestampadd(microsecond, -?, utc_timestamp(6)))";
            conn.exec_drop(sql, (MessageId::new().to_string(), age.as_micros() as i64)).await.unwrap();
        }
    }

    async fn stepped_ago(&self, seconds: f64) {
        let sql = "update postroom_operations set stepped_at = timestampadd(microsecond, ?, utc_timestamp(6))";
        self.connect().await.exec_drop(sql, ((-seconds * 1e6) as i64,)).await.unwrap();
    }

    async fn grow_older(&self, by: Duration) {
        for (table, column) in [
            ("dead_letters", "died_at"),
            ("dead_consume", "died_at"),
            ("audit", "at"),
            ("archive_segments", "taken_until"),
            ("archive_restored", "stays_until"),
        ] {
            let sql = format!("update postroom_{table} set {column} = timestampadd(microsecond, -?, {column})");
            self.connect().await.exec_drop(sql, (by.as_micros() as i64,)).await.unwrap();
        }
    }
}

#[async_trait]
impl Taking for Shop {
    type Held = Conn;

    fn store(&self) -> Arc<dyn postroom::Store> {
        Arc::new(Database::new(&self.url).unwrap())
    }

    async fn run(&self, sql: &str) {
        self.connect().await.query_drop(sql).await.unwrap();
    }

    async fn read(&self, sql: &str) -> Vec<Option<String>> {
        let values: Vec<mysql_async::Value> = self.connect().await.query(sql).await.unwrap();
        let text = |value: mysql_async::Value| match value {
            mysql_async::Value::NULL => None,
            other => Some(other.as_sql(true).trim_matches('\'').to_owned()),
        };
        values.into_iter().map(text).collect()
    }

    async fn hold(&self, sql: &str) -> Option<Conn> {
        let mut conn = self.connect().await;
        conn.query_drop("start transaction").await.unwrap();
        conn.query_drop(sql).await.unwrap();
        Some(conn)
    }

    async fn let_go(&self, mut held: Conn) {
        held.query_drop("commit").await.unwrap();
    }

    async fn empty_outbox(&self) {
        Shop::run(self, "delete from postroom_outbox").await;
    }
}

#[async_trait]
impl Inbox for Shop {
    type Store = Mysql;
    type Session = MysqlSession;

    fn session(&self) -> MysqlSession {
        MysqlSession::new(&self.opts)
    }

    async fn make_due(&self) {
        self.run("update postroom_inbox_messages set due_at = utc_timestamp(6) - interval 1 hour").await;
    }

    async fn dead(&self, consumer: &Consumer) -> Vec<(MessageId, String, String)> {
        let sql = "select id, cause, error from postroom_dead_consume where consumer = ? order by seq";
        let rows: Vec<(String, String, String)> = self.connect().await.exec(sql, (consumer.as_str(),)).await.unwrap();
        rows.into_iter().map(|(id, cause, error)| (id.parse().unwrap(), cause, error)).collect()
    }
}

/// The other family is MySQL's.
pub async fn is_mariadb(conn: &mut Conn) -> bool {
    let version: Option<String> = conn.query_first("select version()").await.unwrap();
    version.unwrap().to_lowercase().contains("mariadb")
}
