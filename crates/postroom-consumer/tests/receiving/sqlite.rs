//! The same runtime on one SQLite file.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Consumer, Message};
use postroom_consumer::{Compensate, Handle, HandlerError, Handlers, Incoming, OutOfOrder, Receiver, Versions};
use postroom_sqlite::{Sqlite, SqliteSession, SqliteTransaction};
use postroom_testkit::surroundings;
use rusqlite::Connection;

use crate::setup::{broker, publish, soon, text, told};

struct DoesAsTold;

#[async_trait]
impl Handle<Sqlite, String> for DoesAsTold {
    async fn handle(&self, tx: &mut SqliteTransaction<'_>, told: &Incoming<String>) -> Result<(), HandlerError> {
        if told.body == "fail" || (told.body == "fail twice" && told.attempts < 2) {
            return Err(HandlerError::Again("told to fail".into()));
        }
        if told.body == "end the transaction" {
            tx.run(|tx| tx.execute_batch("rollback")).await?;
            return Ok(());
        }
        let (id, key) = (told.message.id.to_string(), told.message.ordering_key().map(str::to_owned));
        let what = told.body.clone();
        tx.run(move |tx| {
            tx.execute("insert into effects values (?1, 1) on conflict (id) do update set times = times + 1", [&id])?;
            tx.execute("insert into done (key, what) values (?1, ?2)", rusqlite::params![key, what])
        })
        .await?;
        tx.enqueue(&[Message::new("told", "done", "").key("k")]).await?;
        Ok(())
    }
}

#[async_trait]
impl Compensate<Sqlite> for DoesAsTold {
    async fn compensate(&self, tx: &mut SqliteTransaction<'_>, what: &OutOfOrder<'_>) -> Result<(), HandlerError> {
        let what = match what {
            OutOfOrder::Missing { versions, .. } => format!("missing {}-{}", versions.start(), versions.end()),
            OutOfOrder::Late { handled, .. } => format!("late after {handled}"),
        };
        tx.run(move |tx| tx.execute("insert into done (key, what) values ('o', ?1)", [what])).await?;
        Ok(())
    }
}

fn rows(file: &Connection, key: &str) -> Vec<String> {
    let mut statement = file.prepare("select what from done where key = ?1 order by n").unwrap();
    statement.query_map([key], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_duplicates_and_versions_on_one_file() {
    let path = surroundings::scratch("receiving").join("consumer.db");
    let mut file = postroom_sqlite::connect(&path).unwrap();
    postroom_sqlite::migrate(&mut file).unwrap();
    file.execute_batch(
        "create table effects (id text primary key, times integer);
         create table done (n integer primary key autoincrement, key text, what text);",
    )
    .unwrap();
    let broker = broker();
    let mut messages = vec![told("a", "fail"), told("a", "after"), told("b", "fail twice"), told("b", "last")];
    messages.push(told("c", "end the transaction"));
    let version = |n: i64| Message::new("orders", "told", n.to_string()).aggregate("order", "o", n);
    messages.extend([version(3), version(1), version(5), version(2)]);
    publish(&broker, messages.clone()).await;
    publish(&broker, messages).await;
    let handlers = Handlers::new()
        .on_decoded("told", text, DoesAsTold)
        .versions("order", Versions::in_order(Duration::from_millis(300)))
        .compensation(DoesAsTold);
    let open = {
        let path = path.clone();
        move || SqliteSession::new(&path)
    };
    let receiver =
        Receiver::new(Arc::new(broker.subscribe("q", 9)), Consumer::new("totals").unwrap(), handlers, open).unwrap();
    let receiver = receiver.retry(soon(3)).poll(Duration::from_millis(20)).lease(Duration::from_secs(1)).concurrency(2);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(receiver.run(async move {
        let _ = stopped.await;
    }));
    let finished = "select (select count(*) from done) = 8 and (select count(*) from postroom_inbox_messages) = 0
                       and (select count(*) from postroom_dead_consume) = 2";
    while !file.query_row(finished, [], |row| row.get::<_, bool>(0)).unwrap() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stop.send(()).unwrap();
    let counters = running.await.unwrap().unwrap();
    assert_eq!(rows(&file, "a"), ["after"]);
    assert_eq!(rows(&file, "b"), ["fail twice", "last"]);
    assert_eq!(rows(&file, "o"), ["1", "2", "3", "missing 4-4", "5"]);
    assert_eq!((counters.dead, counters.applied, counters.missing), (2, 7, 1), "{counters:?}");
    let (effects, most): (i64, i64) =
        file.query_row("select count(*), max(times) from effects", [], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    assert_eq!((effects, most), (7, 1));
    let enqueued: i64 = file.query_row("select count(*) from postroom_outbox", [], |row| row.get(0)).unwrap();
    assert_eq!(enqueued, 7);
}
