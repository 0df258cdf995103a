//! The Rust of README.md, as a program that compiles; a test compares the two.

#![allow(dead_code, unused_variables, clippy::unwrap_used)]

use std::future::Future;
use std::sync::Arc;

use postroom::{BoxError, Consumer, RaisesEvents, Subscription, UnitOfWork, Wake};
use postroom_sqlite::Sqlite;
use rusqlite::TransactionBehavior;

async fn through_tokio_postgres(
    client: &mut tokio_postgres::Client,
    id: &str,
    order: OrderPlaced,
) -> Result<(), BoxError> {
    // snippet: begin
    // tokio-postgres; crate postroom-postgres
    use postroom::{Message, Outbox};
    use postroom_postgres::Postgres;

    let mut tx = client.transaction().await?;
    tx.execute("update orders set status = 'placed' where id = $1", &[&id]).await?;
    let message = Message::json("orders", "order.placed", &order)?.key(id);
    Postgres.enqueue(&mut tx, &[message]).await?;
    tx.commit().await?;
    // snippet: end
    Ok(())
}

use postroom::Outbox;

#[rustfmt::skip]
async fn through_sqlx(pool: &sqlx::PgPool, id: &str, message: postroom::Message) -> Result<(), BoxError> {
    // snippet: begin
    // sqlx; postroom-postgres or postroom-sqlite with default-features = false, features = ["sqlx"]
    let mut tx = pool.begin().await?;
    sqlx::query("update orders set status = 'placed' where id = $1").bind(id).execute(&mut *tx).await?;
    Postgres.enqueue(&mut tx, &[message]).await?;   // or Sqlite.enqueue(…)
    tx.commit().await?;
    // snippet: end
    Ok(())
}

fn through_rusqlite(
    connection: &mut rusqlite::Connection,
    id: &str,
    message: postroom::Message,
) -> Result<(), BoxError> {
    // snippet: begin
    // rusqlite; crate postroom-sqlite
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute("update orders set status = 'placed' where id = ?1", [&id])?;
    Sqlite.enqueue_blocking(&tx, &[message])?;
    tx.commit()?;
    // snippet: end
    Ok(())
}

#[rustfmt::skip]
mod event {
    pub fn typed() -> Result<(), postroom::EventError> {
        // snippet: begin
        use postroom::Event;

        #[derive(serde::Serialize)]
        struct OrderPlaced { order_id: String, cents: i64, version: i64 }

        impl Event for OrderPlaced {
            const TOPIC: &'static str = "orders";
            const TYPE: &'static str = "order.placed";
            const AGGREGATE_TYPE: &'static str = "order";
            fn aggregate_id(&self) -> String { self.order_id.clone() }
            fn aggregate_version(&self) -> i64 { self.version }
        }

        let message = OrderPlaced { order_id: "o-17".into(), cents: 1250, version: 1 }.to_message()?;
        // snippet: end
        Ok(())
    }
}

#[derive(serde::Serialize, serde::Deserialize)]
struct OrderPlaced {
    cents: i64,
}

#[rustfmt::skip]
async fn a_unit_of_work(mut order: impl RaisesEvents, mut tx: Transaction<'_>, wake: Wake) -> Result<(), BoxError> {
    // snippet: begin
    let mut work = UnitOfWork::new();
    work.collect(&mut order);
    let written = work.write(&Postgres, &mut tx).await?;   // in the transaction
    tx.commit().await?;
    written.committed(&wake);                              // after it
    // snippet: end
    Ok(())
}

#[rustfmt::skip]
mod receiving {
    // snippet: begin
    use postroom_consumer::{Handle, HandlerError, Handlers, Incoming, Receiver};
    use postroom_postgres::{Connector, Postgres, PostgresSession};
    use tokio_postgres::Transaction;

    struct Totals;

    #[async_trait::async_trait]
    impl Handle<Postgres, OrderPlaced> for Totals {
        async fn handle(&self, tx: &mut Transaction<'_>, order: &Incoming<OrderPlaced>) -> Result<(), HandlerError> {
            tx.execute("update totals set cents = cents + $1", &[&order.body.cents]).await?;
            Ok(())
        }
    }

    // snippet: pause
    use super::{Arc, BoxError, Consumer, Future, OrderPlaced, Subscription};

    pub async fn run(subscription: Arc<dyn Subscription>, stop: impl Future<Output = ()>) -> Result<(), BoxError> {
    // snippet: go on
    let handlers = Handlers::new().on("order.placed", Totals);
    let connector = Connector::new("postgres://localhost/billing")?;
    let receiver = Receiver::new(subscription, Consumer::new("order-totals")?, handlers, move || PostgresSession::new(connector.clone()))?;
    receiver.run(stop).await?;
    // snippet: end
    Ok(())
    }
}

use postroom_postgres::Postgres;
use tokio_postgres::Transaction;

/// The snippets of this file without their indentation.
fn snippets(program: &str) -> Vec<String> {
    let (mut found, mut current): (Vec<String>, Option<Vec<&str>>) = (Vec::new(), None);
    let mut paused = false;
    for line in program.lines() {
        match line.trim() {
            "// snippet: begin" => current = Some(Vec::new()),
            "// snippet: pause" => paused = true,
            "// snippet: go on" => paused = false,
            "// snippet: end" => {
                let lines = current.take().unwrap();
                let indent = lines.iter().filter(|line| !line.trim().is_empty());
                let indent = indent.map(|line| line.len() - line.trim_start().len()).min().unwrap_or_default();
                let lines: Vec<&str> = lines.iter().map(|line| line.get(indent..).unwrap_or_default()).collect();
                found.push(lines.join("\n"));
            }
            _ if paused => {}
            _ => current.iter_mut().for_each(|lines| lines.push(line)),
        }
    }
    found
}

#[test]
fn the_rust_of_readme_is_this() {
    let readme = include_str!("../../../README.md");
    let blocks: Vec<&str> =
        readme.split("```rust\n").skip(1).map(|rest| rest.split("\n```").next().unwrap_or_default()).collect();
    assert_eq!(snippets(include_str!("readme.rs")), blocks);
}
