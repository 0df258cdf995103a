//! Writing and admitting in the caller's own transaction, with each driver.

use postroom::{
    Admission, Consumer, EnqueueError, Event, GuardError, Inbox, Message, MessageId, Outbox, RaisesEvents, UnitOfWork,
    Wake,
};
use postroom_postgres::Postgres;
use sqlx::Connection;

use crate::setup::{claim_all, prepared, source};

#[derive(serde::Serialize)]
struct OrderPlaced {
    order: String,
    version: i64,
}

impl Event for OrderPlaced {
    const TOPIC: &'static str = "orders";
    const TYPE: &'static str = "order.placed";
    const AGGREGATE_TYPE: &'static str = "order";

    fn aggregate_id(&self) -> String {
        self.order.clone()
    }

    fn aggregate_version(&self) -> i64 {
        self.version
    }
}

struct Order(Vec<Message>);

impl RaisesEvents for Order {
    fn take_events(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.0)
    }
}

fn order() -> Order {
    let event = |version| OrderPlaced { order: "o-1".to_owned(), version }.to_message().unwrap();
    Order(vec![event(1), event(2)])
}

#[tokio::test]
async fn a_unit_of_work_writes_through_tokio_postgres_and_wakes_after_the_commit() {
    let database = prepared().await;
    let mut client = database.connect().await;
    let wake = Wake::new();
    let mut order = order();
    let mut tx = client.transaction().await.unwrap();
    let mut work = UnitOfWork::new();
    work.collect(&mut order);
    work.collect(&mut order);
    let written = work.write(&Postgres, &mut tx).await.unwrap();
    tx.commit().await.unwrap();
    written.committed(&wake);
    wake.notified().await;
    let source = source(&database, "relay").await;
    let found: Vec<std::sync::Arc<Message>> =
        claim_all(&source).await.into_iter().map(|delivery| delivery.message).collect();
    assert_eq!(found.iter().map(|message| message.aggregate_version).collect::<Vec<_>>(), [Some(1), Some(2)]);
    assert_eq!(found[0].occurred_at, found[1].occurred_at);
    assert_eq!(found[0].content_type, "application/json");
}

#[tokio::test]
async fn sqlx_transactions_write_and_admit() {
    let database = prepared().await;
    let mut connection = sqlx::PgConnection::connect(database.url()).await.unwrap();
    let message = Message::new("orders", "order.placed", "x").key("a").delay(std::time::Duration::ZERO);

    let mut tx = connection.begin().await.unwrap();
    Postgres.enqueue(&mut tx, &[Message::new("orders", "rolled.back", "x")]).await.unwrap();
    tx.rollback().await.unwrap();
    let mut tx = connection.begin().await.unwrap();
    Postgres.enqueue(&mut tx, std::slice::from_ref(&message)).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = connection.begin().await.unwrap();
    let again = Postgres.enqueue(&mut tx, std::slice::from_ref(&message)).await.unwrap_err();
    assert!(matches!(again, EnqueueError::AlreadyEnqueued { .. }), "{again}");
    tx.rollback().await.unwrap();

    let source = source(&database, "relay").await;
    let found: Vec<MessageId> = claim_all(&source).await.into_iter().map(|delivery| delivery.message.id).collect();
    assert_eq!(found, [message.id]);

    let consumer = Consumer::new("totals").unwrap();
    for expected in [Admission::New, Admission::Duplicate] {
        let mut tx = connection.begin().await.unwrap();
        assert_eq!(Postgres.admit(&mut tx, &consumer, message.id).await.unwrap(), expected);
        tx.commit().await.unwrap();
    }
}

#[tokio::test]
async fn a_message_written_twice_is_a_distinct_error_and_aborts_the_transaction() {
    let database = prepared().await;
    let mut client = database.connect().await;
    let message = Message::new("orders", "order.placed", "x");
    let mut tx = client.transaction().await.unwrap();
    Postgres.enqueue(&mut tx, std::slice::from_ref(&message)).await.unwrap();
    let again = Postgres.enqueue(&mut tx, std::slice::from_ref(&message)).await.unwrap_err();
    assert!(matches!(again, EnqueueError::AlreadyEnqueued { .. }), "{again}");
    assert!(tx.query("select 1", &[]).await.is_err(), "I16");
}

#[tokio::test]
async fn consumers_are_admitted_each_for_itself_and_a_rollback_gives_the_claim_back() {
    let database = prepared().await;
    let mut client = database.connect().await;
    let id = MessageId::new();
    let (one, other) = (Consumer::new("one").unwrap(), Consumer::new("other").unwrap());
    let mut tx = client.transaction().await.unwrap();
    assert_eq!(Postgres.admit(&mut tx, &one, id).await.unwrap(), Admission::New);
    tx.rollback().await.unwrap();
    for (consumer, expected) in [(&one, Admission::New), (&other, Admission::New), (&one, Admission::Duplicate)] {
        let mut tx = client.transaction().await.unwrap();
        assert_eq!(Postgres.admit(&mut tx, consumer, id).await.unwrap(), expected);
        tx.commit().await.unwrap();
    }
}

#[tokio::test]
async fn a_guard_that_fails_rolls_back_business_rows_and_messages_with_an_error_of_its_own() {
    let database = prepared().await;
    let mut client = database.connect().await;
    client
        .batch_execute("create table orders (id int primary key, version int); insert into orders values (1, 1)")
        .await
        .unwrap();
    let update = "update orders set version = version + 1 where id = $1 and version = $2";
    let stale = async |client: &mut tokio_postgres::Client, sql: &str, values: [i32; 2]| {
        let mut tx = client.transaction().await.unwrap();
        Postgres.enqueue(&mut tx, &[Message::new("orders", "order.placed", "x")]).await.unwrap();
        Postgres.execute_guarded(&tx, "place the order", 1, sql, &[&values[0], &values[1]]).await?;
        tx.commit().await.unwrap();
        Ok::<(), GuardError>(())
    };
    stale(&mut client, update, [1, 1]).await.unwrap();
    let row_count = stale(&mut client, update, [1, 1]).await.unwrap_err();
    assert!(matches!(row_count, GuardError::RowCount { expected: 1, actual: 0, .. }), "{row_count}");
    let taken = stale(&mut client, "insert into orders values ($1, $2)", [1, 1]).await.unwrap_err();
    assert!(matches!(&taken, GuardError::Conflict { constraint, .. } if constraint == "orders_pkey"), "{taken}");
    let messages: i64 = client.query_one("select count(*) from postroom.outbox", &[]).await.unwrap().get(0);
    assert_eq!(messages, 1);
}
