//! One effect for each message, on both stores, whatever is delivered again.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Admission, Batch, Consumer, Message, MessageId, Received, Sink, TopicFilter};
use postroom_brokers::in_process::InProcessBroker;
use postroom_consumer::{Handled, Handler, HandlerError, Receiver};
use postroom_postgres::{Connector, Postgres};
use postroom_sqlite::Sqlite;
use postroom_testkit::postgres::Database;
use rusqlite::Connection;
use tokio::sync::{Notify, watch};

const EFFECTS: &str = "create table effects (id text primary key, times integer)";
const EFFECT: &str = "insert into effects values ($1, 1) on conflict (id) do update set times = effects.times + 1";

async fn postgres() -> Database {
    let database = Database::create().await;
    postroom_postgres::migrate(&Connector::new(database.url()).unwrap(), 4).await.unwrap();
    database.connect().await.batch_execute(EFFECTS).await.unwrap();
    database
}

/// Has the effect in PostgreSQL; one that is to die does so after the commit of a new effect and before its ack.
struct InPostgres {
    client: tokio_postgres::Client,
    consumer: Consumer,
    died: Option<Arc<Notify>>,
}

#[async_trait]
impl Handler for InPostgres {
    async fn handle(&mut self, received: &Received) -> Result<Handled, HandlerError> {
        let id = received.message.id;
        let admission = Postgres
            .once(&mut self.client, &self.consumer, id, async |tx| {
                tx.execute(EFFECT, &[&id.to_string()]).await?;
                Ok(())
            })
            .await?;
        if admission == Admission::New
            && let Some(died) = self.died.take()
        {
            died.notify_one();
            std::future::pending::<()>().await;
        }
        Ok(admission.into())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_between_effect_and_ack_leaves_one_effect() {
    let database = postgres().await;
    let broker = InProcessBroker::new();
    broker.declare_queue("q", TopicFilter::all());
    let messages: Vec<Message> = (0..50).map(|n| Message::new("orders", "placed", format!("{n}"))).collect();
    broker.sink().publish(&Batch::new(messages)).await.unwrap();

    let handler = async |died| {
        let client = database.connect().await;
        let handler: Box<dyn Handler> =
            Box::new(InPostgres { client, consumer: Consumer::new("totals").unwrap(), died });
        vec![handler]
    };
    // Five consumers die one after the other, each between its commit and its ack.
    for _ in 0..5 {
        let died = Arc::new(Notify::new());
        let receiver = Receiver::new(Arc::new(broker.subscribe("q", 10)), handler(Some(died.clone())).await);
        let running = tokio::spawn(receiver.run(std::future::pending()));
        died.notified().await;
        running.abort();
        let _ = running.await;
    }
    let (stop, mut stopped) = watch::channel(false);
    let receiver = Receiver::new(Arc::new(broker.subscribe("q", 10)), handler(None).await);
    let running = tokio::spawn(receiver.run(async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    }));
    let client = database.connect().await;
    while broker.unsettled("q") > 0 {
        tokio::task::yield_now().await;
    }
    stop.send(true).unwrap();
    running.await.unwrap();
    let row = client.query_one("select count(*), max(times) from effects", &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i32>(1)), (50, 1), "I5");
    let handed_out = broker.handed_out();
    let repeated = handed_out.len() - handed_out.iter().collect::<std::collections::HashSet<_>>().len();
    assert!(repeated >= 5, "the five whose consumer died after the commit came again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_deliveries_of_one_message_have_one_effect() {
    let database = postgres().await;
    let consumer = Consumer::new("totals").unwrap();
    let ids: Vec<MessageId> = (0..20).map(|_| MessageId::new()).collect();
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let (database, consumer, ids) = (database.clone(), consumer.clone(), ids.clone());
            tokio::spawn(async move {
                let mut client = database.connect().await;
                let mut new = 0;
                for id in ids {
                    let admission = Postgres
                        .once(&mut client, &consumer, id, async |tx| {
                            tx.execute(EFFECT, &[&id.to_string()]).await?;
                            Ok(())
                        })
                        .await
                        .unwrap();
                    new += usize::from(admission == Admission::New);
                }
                new
            })
        })
        .collect();
    let mut new = 0;
    for worker in workers {
        new += worker.await.unwrap();
    }
    let row = database.connect().await.query_one("select count(*), max(times) from effects", &[]).await.unwrap();
    assert_eq!((new, row.get::<_, i64>(0), row.get::<_, i32>(1)), (20, 20, 1));
}

#[test]
fn a_failed_effect_gives_its_claim_back_on_sqlite_and_a_second_delivery_is_a_duplicate() {
    let mut connection = Connection::open_in_memory().unwrap();
    postroom_sqlite::migrate(&mut connection).unwrap();
    connection.execute_batch(EFFECTS).unwrap();
    let consumer = Consumer::new("totals").unwrap();
    let id = MessageId::new();
    let failed = Sqlite.once_blocking(&mut connection, &consumer, id, |tx| {
        tx.execute(EFFECT, [id.to_string()])?;
        Err("something else went wrong".into())
    });
    assert!(failed.is_err());
    for expected in [Admission::New, Admission::Duplicate, Admission::Duplicate] {
        let admission = Sqlite.once_blocking(&mut connection, &consumer, id, |tx| {
            tx.execute(EFFECT, [id.to_string()])?;
            Ok(())
        });
        assert_eq!(admission.unwrap(), expected);
    }
    let times: i64 = connection.query_row("select sum(times) from effects", [], |row| row.get(0)).unwrap();
    assert_eq!(times, 1);
}

#[tokio::test]
async fn an_effect_that_swallowed_a_database_error_is_not_taken_for_done() {
    let database = postgres().await;
    let mut client = database.connect().await;
    let (consumer, id) = (Consumer::new("totals").unwrap(), MessageId::new());
    let outcome = Postgres
        .once(&mut client, &consumer, id, async |tx| {
            tx.execute(EFFECT, &[&id.to_string()]).await?;
            // "Already there", thinks the handler; but the transaction is aborted, and COMMIT would be a silent rollback.
            let _ = tx.execute("insert into effects values ($1, 1)", &[&id.to_string()]).await;
            Ok(())
        })
        .await;
    assert!(outcome.is_err(), "it would be acked, and its effect lost");
}
