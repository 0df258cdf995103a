//! Writers: each order is one transaction that changes business rows and enqueues the message about it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use postroom::{BoxError, Message, MessageId, Outbox};
use postroom_postgres::{Connector, Postgres};
use serde::{Deserialize, Serialize};
use tokio::task::{JoinHandle, JoinSet};

/// The event, as the shipping service reads it too.
#[derive(Debug, Serialize, Deserialize)]
pub struct OrderPlaced {
    pub customer: String,
    pub number: i64,
    pub cents: i64,
}

/// Starts the writers; they return the ids of all messages that they tried to write, committed or not.
pub fn begin(
    connector: &Connector,
    topic: &str,
    writers: usize,
    orders: usize,
) -> JoinHandle<Result<HashSet<MessageId>, BoxError>> {
    let left = Arc::new(AtomicUsize::new(orders));
    let (connector, topic) = (connector.clone(), topic.to_owned());
    tokio::spawn(async move {
        let mut all = JoinSet::new();
        for writer in 0..writers {
            all.spawn(write(connector.clone(), topic.clone(), writer as u64, left.clone()));
        }
        let mut tried = HashSet::new();
        while let Some(writer) = all.join_next().await {
            tried.extend(writer??);
        }
        Ok(tried)
    })
}

async fn write(
    connector: Connector,
    topic: String,
    writer: u64,
    left: Arc<AtomicUsize>,
) -> Result<Vec<MessageId>, BoxError> {
    let mut client = connector.connect().await?;
    let lock = "update orders_example.customers set orders = orders + 1 where name = $1 returning orders";
    let lock = client.prepare(lock).await?;
    let order = client.prepare("insert into orders_example.orders values ($1, $2, $3)").await?;
    let note = client.prepare("insert into orders_example.committed values ($1, $2, $3)").await?;
    let mut tried = Vec::new();
    let mut turn = writer;
    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
        loop {
            turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let customer = format!("customer-{}", (turn >> 33) % 1000);
            let cents = ((turn >> 20) % 9000) as i64 + 1000;
            let mut tx = client.transaction().await?;
            // The row lock on the aggregate comes first: its order is the order of the messages.
            let number: i64 = tx.query_one(&lock, &[&customer]).await?.get(0);
            tx.execute(&order, &[&customer, &number, &cents]).await?;
            let event = OrderPlaced { customer: customer.clone(), number, cents };
            let message = Message::json(&topic, "order.placed", &event)?.aggregate("customer", &customer, number);
            tx.execute(&note, &[message.id.as_uuid(), &customer, &number]).await?;
            Postgres.enqueue(&mut tx, std::slice::from_ref(&message)).await?;
            tried.push(message.id);
            if (turn >> 40) % 10 == 3 {
                tx.rollback().await?;
                continue;
            }
            tx.commit().await?;
            break;
        }
    }
    Ok(tried)
}
