//! The SQLite store passes the suites that every store passes.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Consumer, Message, MessageId, Operator, Route, Source};
use postroom_sqlite::{Database, Sqlite, SqliteSession, SqliteSource, connect, migrate};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::consumer_store::Inbox;
use postroom_testkit::conformance::intake::Taking;
use postroom_testkit::conformance::operator::Operated;
use postroom_testkit::conformance::source::Outbox;
use postroom_testkit::surroundings;
use rusqlite::{Connection, TransactionBehavior, params};

/// The relay's end.
mod source {
    postroom_testkit::source_conforms!(super::File);
}

/// The operator's end.
mod operator {
    postroom_testkit::operator_conforms!(super::File);
}

/// The receiving end.
mod consumer_store {
    postroom_testkit::consumer_store_conforms!(super::File);
}

/// Tables that already exist.
mod intake {
    postroom_testkit::intake_conforms!(super::File);
}

struct File(PathBuf);

impl File {
    fn open(&self) -> Connection {
        connect(&self.0).unwrap()
    }
}

#[async_trait]
impl Fixture for File {
    async fn create() -> Self {
        let path = surroundings::scratch("conformance").join("postroom.db");
        migrate(&mut connect(&path).unwrap()).unwrap();
        let file = Self(path);
        file.open()
            .execute_batch(
                "create table shop_outbox (n integer primary key autoincrement, id text, topic text not null, body text, k text, status integer not null default 0,
                                           at datetime not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')), sent_at datetime, error varchar(20));
                 create index shop_outbox_status on shop_outbox (status, at)",
            )
            .unwrap();
        file
    }
}

#[async_trait]
impl Outbox for File {
    type Open = ();

    async fn open(&self, route: &Route, owner: &str) -> Arc<dyn Source> {
        Arc::new(SqliteSource::open(&Database::new(&self.0), route, owner).unwrap())
    }

    async fn commit(&self, messages: &[Message]) {
        let mut connection = self.open();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        Sqlite.enqueue_blocking(&tx, messages).unwrap();
        tx.commit().unwrap();
    }

    async fn roll_back(&self, messages: &[Message]) {
        let mut connection = self.open();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        Sqlite.enqueue_blocking(&tx, messages).unwrap();
        tx.rollback().unwrap();
    }

    /// Writers take turns.
    async fn begin(&self, _: &[Message]) -> Option<()> {
        None
    }

    async fn end(&self, (): ()) {}

    async fn expire(&self) {
        self.open().execute("update postroom_lanes set expires_ms = 0", []).unwrap();
    }

    async fn make_due(&self) {
        self.open().execute("update postroom_parked set due_ms = 0 where state <> 'queued'", []).unwrap();
    }
}

#[async_trait]
impl Taking for File {
    type Held = ();

    fn store(&self) -> Arc<dyn postroom::Store> {
        Arc::new(Database::new(&self.0))
    }

    async fn run(&self, sql: &str) {
        self.open().execute_batch(sql).unwrap();
    }

    async fn read(&self, sql: &str) -> Vec<Option<String>> {
        let connection = self.open();
        let mut statement = connection.prepare(sql).unwrap();
        let text = |row: &rusqlite::Row<'_>| {
            Ok(match row.get_ref(0)? {
                rusqlite::types::ValueRef::Null => None,
                rusqlite::types::ValueRef::Integer(number) => Some(number.to_string()),
                other => Some(other.as_str().unwrap().to_owned()),
            })
        };
        statement.query_map([], text).unwrap().map(Result::unwrap).collect()
    }

    /// Writers take turns.
    async fn hold(&self, _: &str) -> Option<()> {
        None
    }

    async fn let_go(&self, (): ()) {}

    async fn empty_outbox(&self) {
        self.open().execute("delete from postroom_outbox", []).unwrap();
    }
}

#[async_trait]
impl Operated for File {
    fn operator(&self) -> Arc<dyn Operator> {
        Arc::new(Database::new(&self.0))
    }

    async fn audit(&self) -> Vec<(String, String, String, usize)> {
        let connection = self.open();
        let sql = "select actor, action, reason, json_array_length(message_ids) from postroom_audit order by rowid";
        let mut rows = connection.prepare(sql).unwrap();
        rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get::<_, i64>(3)? as usize)))
            .unwrap()
            .map(Result::unwrap)
            .collect()
    }

    async fn processed(&self, age: Duration, count: usize) {
        let sql = "insert into postroom_inbox (consumer, message_id, processed_ms)
                   values ('totals', ?1, cast(unixepoch('subsec') * 1000 as integer) - ?2)";
        for _ in 0..count {
            self.open().execute(sql, params![MessageId::new().to_string(), age.as_millis() as i64]).unwrap();
        }
    }

    async fn stepped_ago(&self, seconds: f64) {
        let sql = "update postroom_operations set stepped_ms = cast((unixepoch('subsec') - ?1) * 1000 as integer)";
        self.open().execute(sql, [seconds]).unwrap();
    }

    async fn grow_older(&self, by: Duration) {
        for (table, column) in [
            ("dead_letters", "died_ms"),
            ("dead_consume", "died_ms"),
            ("audit", "at_ms"),
            ("archive_segments", "taken_until_ms"),
            ("archive_restored", "stays_until_ms"),
        ] {
            let sql = format!("update postroom_{table} set {column} = {column} - ?1");
            self.open().execute(&sql, [by.as_millis() as i64]).unwrap();
        }
    }
}

#[async_trait]
impl Inbox for File {
    type Store = Sqlite;
    type Session = SqliteSession;

    fn session(&self) -> SqliteSession {
        SqliteSession::new(&self.0)
    }

    async fn make_due(&self) {
        self.open().execute("update postroom_inbox_messages set due_ms = 0", []).unwrap();
    }

    async fn dead(&self, consumer: &Consumer) -> Vec<(MessageId, String, String)> {
        let connection = self.open();
        let sql = "select id, cause, error from postroom_dead_consume where consumer = ?1 order by seq";
        let mut rows = connection.prepare(sql).unwrap();
        rows.query_map([consumer.as_str()], |row| Ok((row.get::<_, String>(0)?, row.get(1)?, row.get(2)?)))
            .unwrap()
            .map(|row| row.map(|(id, cause, error)| (id.parse().unwrap(), cause, error)).unwrap())
            .collect()
    }
}
