//! A database of a test's own, on the server of `POSTROOM_TEST_MSSQL_URL` or in the emulation.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Consumer, Message, MessageId, Outbox as _, Route, Source};
use postroom_mssql::{Conn, Mssql, MssqlSession, MssqlSource, Settings, connect, migrate, settings_of};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::consumer_store::Inbox;
use postroom_testkit::conformance::source::Outbox;
use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings;

use crate::emulation;

pub struct Shop {
    pub settings: Settings,
}

impl Shop {
    /// An empty database. The server's URL names one that is there, such as `sqlserver://sa:PASSWORD@localhost/master?trust_server_certificate=true`.
    pub async fn empty() -> Self {
        let Ok(server) = std::env::var("POSTROOM_TEST_MSSQL_URL") else {
            let database = Database::create().await;
            let port = emulation::start(database.url().to_owned()).await;
            let settings = settings_of(&format!("sqlserver://sa:x@127.0.0.1:{port}/shop?encrypt=false")).unwrap();
            return Self { settings };
        };
        let name = format!("t_{}", surroundings::unique());
        let mut admin = connect(&settings_of(&server).unwrap()).await.unwrap();
        run(&mut admin, &format!("create database {name}")).await;
        run(&mut admin, &format!("alter database {name} set read_committed_snapshot on")).await;
        let (begin, query) =
            server.split_once('?').map_or((server.as_str(), String::new()), |(url, query)| (url, format!("?{query}")));
        let (begin, _) = begin.rsplit_once('/').unwrap();
        Self { settings: settings_of(&format!("{begin}/{name}{query}")).unwrap() }
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
        let text = |row: &tiberius::Row, index: usize| row.try_get::<&str, _>(index).unwrap().unwrap().to_owned();
        rows.iter().map(|row| (text(row, 0).parse().unwrap(), text(row, 1), text(row, 2))).collect()
    }
}
