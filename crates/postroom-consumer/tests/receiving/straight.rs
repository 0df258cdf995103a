//! From an outbox straight into an inbox, of another database or of the same, and to handlers that take from there.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Batch, Consumer, Message, Operator, Outbox, Route, Sink, Store, Verdict};
use postroom_consumer::{FromInbox, Handlers, InboxSink, Receiver};
use postroom_postgres::{Connector, Postgres, PostgresSession};
use postroom_relay::Relay;
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::sink::{FarEnd, Fault, Stored};
use postroom_testkit::postgres::Database;
use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::surroundings;
use tokio::sync::watch;

use crate::setup::{Running, as_told, assert_once, done, postgres, receiver, told, until};

mod postgres_inbox {
    mod sink {
        postroom_testkit::sink_conforms!(super::super::OnPostgres);
    }
}

mod sqlite_inbox {
    mod sink {
        postroom_testkit::sink_conforms!(super::super::OnSqlite);
    }
}

fn sink_of(store: &dyn Store, keepers: usize) -> InboxSink {
    let consumer = Consumer::new("totals").unwrap();
    let keepers = (0..keepers).map(|_| store.keeper(&consumer)).collect();
    InboxSink::new(keepers, store.shown()).deadline(Duration::from_secs(2))
}

fn on_postgres(url: &str, keepers: usize) -> InboxSink {
    sink_of(&postroom_postgres::Database::of(Connector::new(url).unwrap()), keepers)
}

/// Longer than a column.
fn refused() -> Message {
    Message::new("orders", "order.placed", "x").key("k".repeat(100_000))
}

/// The inbox of a PostgreSQL behind a link that loses, holds and slows down what it carries.
pub struct OnPostgres {
    database: Database,
    link: Proxy,
}

#[async_trait]
impl Fixture for OnPostgres {
    async fn create() -> Self {
        let database = postgres().await;
        let link = Proxy::to(&address_of(database.url())).await;
        Self { database, link }
    }
}

fn address_of(url: &str) -> String {
    let rest = url.split_once("://").unwrap().1;
    let place = rest.split('/').next().unwrap();
    place.rsplit('@').next().unwrap().to_owned()
}

#[async_trait]
impl FarEnd for OnPostgres {
    async fn sink(&self) -> Arc<dyn Sink> {
        let url = self.database.url();
        Arc::new(on_postgres(&url.replacen(&address_of(url), &self.link.address(), 1), 2))
    }

    async fn begin(&self, fault: Fault) -> bool {
        match fault {
            Fault::Reject => {}
            Fault::StoreAndFail => self.link.set(Link::RepliesLost),
            Fault::Hold => self.link.set(Link::BlackHole),
            Fault::Slow => self.link.set(Link::Throttled(20_000)),
        }
        true
    }

    fn refused(&self) -> Message {
        refused()
    }

    async fn heal(&self) {
        self.link.set(Link::Open);
        self.link.reset();
    }

    async fn stored(&self) -> Vec<Stored> {
        let client = self.database.connect().await;
        let all = "select message_id::text, payload from postroom.inbox_messages order by seq";
        let rows = client.query(all, &[]).await.unwrap();
        client.batch_execute("delete from postroom.inbox_messages").await.unwrap();
        rows.iter().map(|row| Stored { id: row.get(0), payload: row.get(1) }).collect()
    }
}

/// The inbox of a SQLite file.
pub struct OnSqlite(std::path::PathBuf);

#[async_trait]
impl Fixture for OnSqlite {
    async fn create() -> Self {
        let path = surroundings::scratch("straight").join("inbox.db");
        let mut file = postroom_sqlite::connect(&path).unwrap();
        postroom_sqlite::migrate(&mut file).unwrap();
        Self(path)
    }
}

#[async_trait]
impl FarEnd for OnSqlite {
    async fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(sink_of(&postroom_sqlite::Database::new(&self.0), 2))
    }

    async fn begin(&self, fault: Fault) -> bool {
        matches!(fault, Fault::Reject)
    }

    fn refused(&self) -> Message {
        refused()
    }

    async fn heal(&self) {}

    async fn stored(&self) -> Vec<Stored> {
        let file = postroom_sqlite::connect(&self.0).unwrap();
        let all = "select id, payload from postroom_inbox_messages order by seq";
        let mut statement = file.prepare(all).unwrap();
        let stored = statement.query_map([], |row| Ok(Stored { id: row.get(0)?, payload: row.get(1)? })).unwrap();
        let stored = stored.map(Result::unwrap).collect();
        drop(statement);
        file.execute_batch("delete from postroom_inbox_messages").unwrap();
        stored
    }
}

/// A relay until it is told to stop, or dropped.
fn relay(outbox: &Database, sink: Arc<dyn Sink>, owner: &str) -> (watch::Sender<bool>, tokio::task::JoinHandle<()>) {
    let (stop, mut stopped) = watch::channel(false);
    let (url, owner) = (outbox.url().to_owned(), owner.to_owned());
    let task = tokio::spawn(async move {
        let store = postroom_postgres::Database::of(Connector::new(&url).unwrap());
        let mut route = Route::new("straight");
        route.lease = Duration::from_secs(1);
        let source = store.source(&route, &owner).await.unwrap();
        let relay = Relay::new(route, source, sink).poll_idle(Duration::from_millis(20));
        relay
            .run(async move {
                let _ = stopped.wait_for(|stopped| *stopped).await;
            })
            .await;
    });
    (stop, task)
}

async fn enqueue(outbox: &Database, messages: &[Message]) {
    let mut client = outbox.connect().await;
    for some in messages.chunks(50) {
        let mut tx = client.transaction().await.unwrap();
        Postgres.enqueue(&mut tx, some).await.unwrap();
        tx.commit().await.unwrap();
    }
}

/// I1, I4, I5: whatever relays are aborted at.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_is_in_the_other_inbox_exactly_once_and_in_order_while_relays_are_aborted() {
    let (outbox, inbox) = (postgres().await, postgres().await);
    let messages: Vec<Message> = (0..2_000).map(|n| told(&format!("k{}", n % 40), &n.to_string())).collect();
    enqueue(&outbox, &messages).await;
    let client = inbox.connect().await;
    let kept =
        async || -> i64 { client.query_one("select count(*) from postroom.inbox_messages", &[]).await.unwrap().get(0) };
    for round in 0.. {
        let (stop, task) = relay(&outbox, Arc::new(on_postgres(inbox.url(), 4)), &format!("relay-{round}"));
        let before = kept().await;
        while kept().await <= before && kept().await < 2_000 {
            tokio::task::yield_now().await;
        }
        if kept().await < 2_000 && round < 5 {
            task.abort();
            let _ = task.await;
            continue;
        }
        let store = postroom_postgres::Database::of(Connector::new(outbox.url()).unwrap());
        while Operator::status(&store).await.unwrap().routes.iter().any(|route| route.backlog + route.parked > 0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        stop.send(true).unwrap();
        task.await.unwrap();
        break;
    }
    let rows =
        client.query("select key, convert_from(payload, 'utf8')::int from postroom.inbox_messages order by seq", &[]);
    let mut last = std::collections::HashMap::new();
    let rows = rows.await.unwrap();
    assert_eq!(rows.len(), 2_000, "each once");
    for row in rows {
        let (key, n): (String, i32) = (row.get(0), row.get(1));
        assert!(last.insert(key, n).is_none_or(|before| before < n), "I4");
    }
}

/// A cache or a stock that is kept beside the outbox, with the guarantees of an inbox.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handlers_in_the_process_take_what_a_relay_puts_into_the_inbox_of_the_same_database() {
    let database = postgres().await;
    let mut messages: Vec<Message> = (0..300).map(|n| told(&format!("k{}", n % 20), &n.to_string())).collect();
    messages.extend([told("a", "fail twice"), told("a", "behind"), told("b", "reject"), told("b", "on")]);
    enqueue(&database, &messages).await;
    let (stop, relay) = relay(&database, Arc::new(on_postgres(database.url(), 2)), "relay");
    let handling = Running::start(receiver(&database, FromInbox, as_told()));
    let client = database.connect().await;
    until(&client, "select count(*) >= 303 from done").await;
    assert_eq!(done(&client, "a").await, ["fail twice", "behind"]);
    assert_eq!(done(&client, "b").await, ["on"], "the one before is dead");
    let expected: Vec<String> = (0..15).map(|n| (n * 20 + 7).to_string()).collect();
    assert_eq!(done(&client, "k7").await, expected);
    assert_once(&client).await;
    stop.send(true).unwrap();
    relay.await.unwrap();
    handling.stop().await;
}

#[tokio::test]
async fn what_the_inbox_cannot_keep_fails_alone_and_a_store_that_is_away_is_told() {
    let inbox = postgres().await;
    let sink = on_postgres(inbox.url(), 1);
    let batch = [told("a", "1"), refused(), told("b", "nul \0"), told("a", "2")];
    let mut verdicts = sink.publish(&Batch::new(batch.clone())).await.unwrap();
    let verdicts: Vec<Verdict> = (0..4).map(|place| verdicts.take(place)).collect();
    assert_eq!([0, 2, 3].map(|place| &verdicts[place]), [&Verdict::Stored; 3]);
    assert!(
        matches!(&verdicts[1], Verdict::Failed(failure) if failure.reason.contains("key has more than")),
        "{verdicts:?}"
    );
    // Twice, at once and again.
    let twice = Batch::new([batch[0].clone(), batch[0].clone()]);
    assert_eq!(sink.publish(&twice).await.unwrap().take(1), Verdict::Stored);
    let count = "select count(*) from postroom.inbox_messages";
    assert_eq!(inbox.connect().await.query_one(count, &[]).await.unwrap().get::<_, i64>(0), 3);
    // Without its tables.
    inbox.connect().await.batch_execute("alter table postroom.inbox_messages rename to away").await.unwrap();
    assert!(sink.publish(&Batch::new([told("c", "1")])).await.is_err());
    assert!(sink.disconnected().is_some());
    inbox.connect().await.batch_execute("alter table postroom.away rename to inbox_messages").await.unwrap();
    sink.probe().await.unwrap();
    assert_eq!(sink.disconnected(), None);
}

/// The Rust of docs/inbox-sink.md, as a function that compiles.
async fn beside_the_relay(
    connector: Connector,
    route: Route,
    handlers: Handlers<Postgres>,
) -> Result<(Relay, Receiver<Postgres>), postroom::BoxError> {
    // snippet: begin
    let store = postroom_postgres::Database::of(connector.clone());
    let consumer = Consumer::new("stock")?;
    let keepers = (0..2).map(|_| store.keeper(&consumer)).collect();
    let source = store.source(&route, "stock-1").await?;
    let relay = Relay::new(route, source, Arc::new(InboxSink::new(keepers, store.shown())));
    let sessions = move || PostgresSession::new(connector.clone());
    let receiver = Receiver::new(Arc::new(FromInbox), consumer, handlers, sessions)?;
    // snippet: end
    Ok((relay, receiver))
}

#[tokio::test]
async fn the_rust_of_the_document_is_this() {
    let code = include_str!("straight.rs").split("// snippet: begin\n").nth(1).unwrap();
    let code: String = code
        .lines()
        .take_while(|line| !line.contains("// snippet: end"))
        .map(|line| line.trim().to_owned() + "\n")
        .collect();
    let document = include_str!("../../../../docs/inbox-sink.md");
    assert_eq!(document.split("```rust\n").nth(1).unwrap().split("```").next().unwrap(), code);
    let database = postgres().await;
    beside_the_relay(Connector::new(database.url()).unwrap(), Route::new("stock"), as_told()).await.unwrap();
}
