//! The same runtime with handlers that work in sqlx transactions.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Consumer, Message, Outbox};
use postroom_consumer::{Handle, HandlerError, Handlers, Incoming, Receiver, Stale, Versions};
use postroom_postgres::{Postgres, SqlxPostgres, SqlxSession};
use sqlx::Transaction;

use crate::setup::{EFFECT, assert_once, broker, done, postgres, publish, soon, text, told, until};

struct DoesAsTold;

#[async_trait]
impl Handle<SqlxPostgres, String> for DoesAsTold {
    async fn handle(
        &self,
        tx: &mut Transaction<'_, sqlx::Postgres>,
        told: &Incoming<String>,
    ) -> Result<(), HandlerError> {
        if told.body == "fail" || (told.body == "fail twice" && told.attempts < 2) {
            return Err(HandlerError::Again("told to fail".into()));
        }
        sqlx::query(EFFECT).bind(told.message.id.to_string()).execute(&mut **tx).await?;
        sqlx::query("insert into done (key, what) values ($1, $2)")
            .bind(told.message.ordering_key())
            .bind(&told.body)
            .execute(&mut **tx)
            .await?;
        Postgres.enqueue(tx, &[Message::new("told", "done", "")]).await?;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_duplicates_and_versions_through_sqlx() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let mut messages = vec![told("a", "fail"), told("a", "after"), told("b", "fail twice"), told("b", "last")];
    let version = |n: i64| Message::new("orders", "told", n.to_string()).aggregate("order", "o", n);
    messages.extend([version(3), version(1), version(2)]);
    publish(&broker, messages.clone()).await;
    publish(&broker, messages).await;
    let window = Versions::InOrder { window: Duration::from_secs(60), first: Some(1), late: Stale::Ignore };
    let handlers = Handlers::new().on_decoded("told", text, DoesAsTold).versions("order", window).compensation(Nobody);
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(8).connect(database.url()).await.unwrap();
    let sessions = pool.clone();
    let open = move || SqlxSession::new(sessions.clone());
    let consumer = Consumer::new("totals").unwrap();
    let receiver = Receiver::new(Arc::new(broker.subscribe("q", 9)), consumer, handlers, open).unwrap();
    let receiver = receiver.retry(soon(3)).poll(Duration::from_millis(20)).concurrency(4);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(receiver.run(async move {
        let _ = stopped.await;
    }));
    until(&client, "select count(*) = 6 from done").await;
    until(&client, "select count(*) = 1 from postroom.dead_consume").await;
    while broker.unsettled("q") > 0 {
        tokio::task::yield_now().await;
    }
    stop.send(()).unwrap();
    let counters = running.await.unwrap().unwrap();
    assert_eq!(done(&client, "a").await, ["after"]);
    assert_eq!(done(&client, "b").await, ["fail twice", "last"]);
    assert_eq!(done(&client, "o").await, ["1", "2", "3"]);
    assert_eq!((counters.applied, counters.dead, counters.duplicates), (6, 1, 7), "{counters:?}");
    assert_once(&client).await;
    let enqueued: i64 = client.query_one("select count(*) from postroom.outbox", &[]).await.unwrap().get(0);
    assert_eq!(enqueued, 6);
}

struct Nobody;

#[async_trait]
impl postroom_consumer::Compensate<SqlxPostgres> for Nobody {
    async fn compensate(
        &self,
        _: &mut Transaction<'_, sqlx::Postgres>,
        what: &postroom_consumer::OutOfOrder<'_>,
    ) -> Result<(), HandlerError> {
        Err(HandlerError::reject(format!("{what:?}")))
    }
}
