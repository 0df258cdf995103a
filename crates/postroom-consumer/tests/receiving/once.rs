//! One effect for each message, whatever is delivered again.

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Admission, Answer, Arrival, Bound, Consumer, Message, MessageId, Receipt, Subscription, Unavailable};
use postroom_brokers::in_process::InProcessSubscription;
use postroom_postgres::Postgres;
use postroom_sqlite::Sqlite;
use rusqlite::Connection;
use tokio::sync::Notify;

use crate::setup::{EFFECT, Running, as_told, assert_once, broker, postgres, publish, receiver, told, until};

/// Dies instead of acking: after the commit.
struct DiesAtAck {
    subscription: InProcessSubscription,
    died: Arc<Notify>,
}

#[async_trait]
impl Subscription for DiesAtAck {
    async fn receive(&self, max: Bound) -> Result<Arrival, Unavailable> {
        self.subscription.receive(max).await
    }

    async fn settle(&self, _: &[(Receipt, Answer)]) -> Result<(), Unavailable> {
        self.died.notify_one();
        std::future::pending().await
    }

    async fn close(&self) {
        self.subscription.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_between_effect_and_ack_leaves_one_effect() {
    let database = postgres().await;
    let broker = broker();
    publish(&broker, (0..50).map(|n| told(&format!("k{}", n % 7), &n.to_string())).collect()).await;
    // Five consumers die one after the other, each between its commit and its ack.
    for _ in 0..5 {
        let died = Arc::new(Notify::new());
        let subscription = DiesAtAck { subscription: broker.subscribe("q", 10), died: died.clone() };
        let running = Running::start(receiver(&database, subscription, as_told()).batch_max(2));
        died.notified().await;
        running.crash().await;
    }
    let running = Running::start(receiver(&database, broker.subscribe("q", 10), as_told()));
    let client = database.connect().await;
    // Those that the dead had in hand are taken over when their claims have lapsed.
    until(&client, "select count(*) = 50 from effects").await;
    while broker.unsettled("q") > 0 {
        tokio::task::yield_now().await;
    }
    running.stop().await;
    assert_once(&client).await;
    for key in 0..7 {
        let done: Vec<i64> = client
            .query("select what::bigint from done where key = $1 order by n", &[&format!("k{key}")])
            .await
            .unwrap()
            .iter()
            .map(|row| row.get(0))
            .collect();
        assert!(done.is_sorted(), "order within a key: {done:?}");
    }
    let handed_out = broker.handed_out();
    let repeated = handed_out.len() - handed_out.iter().collect::<std::collections::HashSet<_>>().len();
    assert!(repeated >= 5, "those whose consumer died after the commit came again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_receivers_and_five_deliveries_of_each_message_have_one_effect() {
    let database = postgres().await;
    let broker = broker();
    let messages: Vec<Message> = (0..200).map(|n| told(&format!("k{}", n % 20), &n.to_string())).collect();
    for _ in 0..5 {
        publish(&broker, messages.clone()).await;
    }
    let two = [(), ()].map(|()| Running::start(receiver(&database, broker.subscribe("q", 50), as_told())));
    while broker.unsettled("q") > 0 {
        tokio::task::yield_now().await;
    }
    let mut applied = 0;
    for running in two {
        applied += running.stop().await.applied;
    }
    let client = database.connect().await;
    let effects: i64 = client.query_one("select count(*) from effects", &[]).await.unwrap().get(0);
    assert_eq!((effects, applied), (200, 200));
    assert_once(&client).await;
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
    connection.execute_batch("create table effects (id text primary key, times integer)").unwrap();
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
