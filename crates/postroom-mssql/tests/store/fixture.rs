//! A database of a test's own, on the server of `POSTROOM_TEST_MSSQL_URL` or in the emulation.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Consumer, Message, MessageId, Operator, Outbox as _, Route, Source};
use postroom_mssql::{
    Conn, Database as Store, Mssql, MssqlSession, MssqlSource, Settings, connect, migrate, settings_of,
};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::consumer_store::Inbox;
use postroom_testkit::conformance::intake::Taking;
use postroom_testkit::conformance::operator::Operated;
use postroom_testkit::conformance::source::Outbox;
use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings;

pub struct Shop {
    pub url: String,
    pub settings: Settings,
}

impl Shop {
    /// An empty database. The server's URL names one that is there, such as `sqlserver://sa:PASSWORD@localhost/master?trust_server_certificate=true`.
    pub async fn empty() -> Self {
        let Ok(server) = std::env::var("POSTROOM_TEST_MSSQL_URL") else {
            let database = Database::create().await;
            let port = postroom_testkit::mssql::start(database.url().to_owned()).await;
            return Self::at(format!("sqlserver://sa:x@127.0.0.1:{port}/shop?encrypt=false"));
        };
        let name = format!("t_{}", surroundings::unique());
        let mut admin = connect(&settings_of(&server).unwrap()).await.unwrap();
        run(&mut admin, &format!("create database {name}")).await;
        run(&mut admin, &format!("alter database {name} set read_committed_snapshot on")).await;
        let (begin, query) =
            server.split_once('?').map_or((server.as_str(), String::new()), |(url, query)| (url, format!("?{query}")));
        let (begin, _) = begin.rsplit_once('/').unwrap();
        Self::at(format!("{begin}/{name}{query}"))
    }

    fn at(url: String) -> Self {
        Self { settings: settings_of(&url).unwrap(), url }
    }

    /// The first column of what a statement finds.
    async fn column(&self, sql: &str) -> Vec<Option<String>> {
        let mut conn = self.connect().await;
        let rows = conn.driver().simple_query(sql).await.unwrap().into_first_result().await.unwrap();
        rows.iter().map(|row| text(row, 0)).collect()
    }

    pub async fn connect(&self) -> Conn {
        connect(&self.settings).await.unwrap()
    }

    pub async fn run(&self, sql: &str) {
        self.connect().await.driver().simple_query(sql).await.unwrap().into_results().await.unwrap();
    }

    /// Writes in a transaction that is open yet.
    async fn written(&self, messages: &[Message]) -> Conn {
        let mut conn = self.connect().await;
        run(&mut conn, "begin transaction").await;
        Mssql.enqueue(&mut conn, messages).await.unwrap();
        conn
    }
}

pub async fn run(conn: &mut Conn, sql: &str) {
    conn.driver().simple_query(sql).await.unwrap().into_results().await.unwrap();
}

#[async_trait]
impl Fixture for Shop {
    async fn create() -> Self {
        let shop = Self::empty().await;
        migrate(&shop.settings, Some(4)).await.unwrap();
        shop.run(
            "create table shop_outbox (
                n         bigint        identity not null constraint shop_outbox_pk primary key,
                id        nvarchar(64),
                topic     nvarchar(64)  not null,
                body      nvarchar(max),
                k         nvarchar(64),
                status    smallint      not null default 0,
                at        datetime2(6)  not null default sysutcdatetime(),
                sent_at   datetime2(6),
                error     nvarchar(20)
            )",
        )
        .await;
        shop.run("create index shop_outbox_status on shop_outbox (status, at)").await;
        shop
    }
}

#[async_trait]
impl Outbox for Shop {
    type Open = Conn;

    async fn open(&self, route: &Route, owner: &str) -> Arc<dyn Source> {
        Arc::new(MssqlSource::open(&self.settings, route, owner).await.unwrap().positions_every(Duration::ZERO))
    }

    async fn commit(&self, messages: &[Message]) {
        run(&mut self.written(messages).await, "commit transaction").await;
    }

    async fn roll_back(&self, messages: &[Message]) {
        run(&mut self.written(messages).await, "if @@trancount > 0 rollback transaction").await;
    }

    async fn begin(&self, messages: &[Message]) -> Option<Conn> {
        Some(self.written(messages).await)
    }

    async fn end(&self, mut open: Conn) {
        run(&mut open, "commit transaction").await;
    }

    async fn expire(&self) {
        self.run("update postroom_lanes set expires_at = '1970-01-02'").await;
        self.run("update postroom_relays set expires_at = '1970-01-02'").await;
    }

    async fn make_due(&self) {
        self.run("update postroom_parked set due_at = dateadd(hour, -1, sysutcdatetime()) where state <> 'queued'")
            .await;
    }
}

#[async_trait]
impl Inbox for Shop {
    type Store = Mssql;
    type Session = MssqlSession;

    fn session(&self) -> MssqlSession {
        MssqlSession::new(&self.settings)
    }

    async fn make_due(&self) {
        self.run("update postroom_inbox_messages set due_at = dateadd(hour, -1, sysutcdatetime())").await;
    }

    async fn dead(&self, consumer: &Consumer) -> Vec<(MessageId, String, String)> {
        let sql =
            format!("select id, cause, error from postroom_dead_consume where consumer = '{consumer}' order by seq");
        let mut conn = self.connect().await;
        let rows = conn.driver().simple_query(sql).await.unwrap().into_first_result().await.unwrap();
        let text = |row, index| text(row, index).unwrap();
        rows.iter().map(|row| (text(row, 0).parse().unwrap(), text(row, 1), text(row, 2))).collect()
    }
}

/// A cell as text.
fn text(row: &tiberius::Row, index: usize) -> Option<String> {
    match row.cells().nth(index).unwrap().1 {
        tiberius::ColumnData::String(value) => value.as_ref().map(|text| text.clone().into_owned()),
        tiberius::ColumnData::Guid(value) => value.map(|id| id.to_string()),
        tiberius::ColumnData::I16(value) => value.map(|value| value.to_string()),
        tiberius::ColumnData::I32(value) => value.map(|value| value.to_string()),
        tiberius::ColumnData::I64(value) => value.map(|value| value.to_string()),
        other => panic!("{other:?}"),
    }
}

#[async_trait]
impl Operated for Shop {
    fn operator(&self) -> Arc<dyn Operator> {
        Arc::new(Store::new(&self.url).unwrap())
    }

    async fn audit(&self) -> Vec<(String, String, String, usize)> {
        let sql = "select actor, action, reason, message_ids from postroom_audit order by id";
        let mut conn = self.connect().await;
        let rows = conn.driver().simple_query(sql).await.unwrap().into_first_result().await.unwrap();
        let text = |row, index| text(row, index).unwrap();
        let ids = |row| serde_json::from_str::<Vec<String>>(&text(row, 3)).unwrap().len();
        rows.iter().map(|row| (text(row, 0), text(row, 1), text(row, 2), ids(row))).collect()
    }

    async fn processed(&self, age: Duration, count: usize) {
        for _ in 0..count {
            let (id, seconds) = (MessageId::new(), age.as_secs());
            self.run(&format!(
                "insert into postroom_inbox (consumer, message_id, processed_at)
                 values ('totals', '{id}', dateadd(second, -{seconds}, sysutcdatetime()))"
            ))
            .await;
        }
    }

    async fn stepped_ago(&self, seconds: f64) {
        let us = (-seconds * 1e6) as i64;
        self.run(&format!("update postroom_operations set stepped_at = dateadd(microsecond, {us}, sysutcdatetime())"))
            .await;
    }

    async fn grow_older(&self, by: Duration) {
        for (table, column) in [
            ("dead_letters", "died_at"),
            ("dead_consume", "died_at"),
            ("audit", "at"),
            ("archive_segments", "taken_until"),
            ("archive_restored", "stays_until"),
        ] {
            let seconds = by.as_secs();
            self.run(&format!("update postroom_{table} set {column} = dateadd(second, -{seconds}, {column})")).await;
        }
    }
}

#[async_trait]
impl Taking for Shop {
    type Held = Conn;

    fn store(&self) -> Arc<dyn postroom::Store> {
        Arc::new(Store::new(&self.url).unwrap())
    }

    async fn run(&self, sql: &str) {
        Shop::run(self, sql).await;
    }

    async fn read(&self, sql: &str) -> Vec<Option<String>> {
        self.column(sql).await
    }

    async fn hold(&self, sql: &str) -> Option<Conn> {
        let mut conn = self.connect().await;
        run(&mut conn, "begin transaction").await;
        run(&mut conn, sql).await;
        Some(conn)
    }

    async fn let_go(&self, mut held: Conn) {
        run(&mut held, "commit transaction").await;
    }

    async fn empty_outbox(&self) {
        Shop::run(self, "delete from postroom_outbox").await;
    }
}
