//! The consumer: totals by customer in its own database, each message once.

use async_trait::async_trait;
use postroom::{Consumer, Received};
use postroom_consumer::{Handled, Handler, HandlerError};
use postroom_sqlite::{Sqlite, connect};
use rusqlite::{Connection, params};
use serde::Deserialize;
use tokio::sync::oneshot;

use super::ledger::{Files, failed};
use crate::exit::{self, Failure};

#[derive(Deserialize)]
struct OrderPlaced {
    customer: String,
    cents: i64,
}

/// Tables of the projection and of its inbox.
pub fn prepare(files: &Files) -> Result<(), Failure> {
    let mut projection = connect(&files.projection)?;
    postroom_sqlite::migrate(&mut projection).map_err(|error| Failure::of(exit::FAILURE, &error))?;
    projection
        .execute_batch(
            "create table totals (customer text primary key, orders integer, cents integer);
             create table effects (message_id text primary key, times integer);",
        )
        .map_err(failed)
}

/// Adds orders up; one that is told to crash does so once, after a commit and before the ack.
pub struct Projection {
    connection: Connection,
    consumer: Consumer,
    crash: Option<oneshot::Sender<()>>,
}

impl Projection {
    pub fn open(files: &Files, crash: Option<oneshot::Sender<()>>) -> Result<Self, Failure> {
        let connection = connect(&files.projection)?;
        connection.pragma_update(None, "synchronous", "normal").map_err(failed)?;
        let consumer = Consumer::new("order-totals").map_err(|error| Failure::of(exit::FAILURE, &error))?;
        Ok(Self { connection, consumer, crash })
    }
}

#[async_trait]
impl Handler for Projection {
    async fn handle(&mut self, received: &Received) -> Result<Handled, HandlerError> {
        let order: OrderPlaced =
            serde_json::from_slice(&received.message.payload).map_err(|error| HandlerError::Reject(error.into()))?;
        let id = received.message.id;
        let (connection, consumer) = (&mut self.connection, &self.consumer);
        let admission = tokio::task::block_in_place(|| {
            Sqlite.once_blocking(connection, consumer, id, |tx| {
                tx.execute(
                    "insert into totals values (?1, 1, ?2)
                         on conflict (customer) do update set orders = orders + 1, cents = cents + excluded.cents",
                    params![order.customer, order.cents],
                )?;
                tx.execute(
                    "insert into effects values (?1, 1) on conflict (message_id) do update set times = times + 1",
                    [id.to_string()],
                )?;
                Ok(())
            })
        })?;
        if let Some(crash) = self.crash.take() {
            let _ = crash.send(());
            // Dead: this handler never returns, so the ack is never sent; the demo ends its task.
            std::future::pending::<()>().await;
        }
        Ok(admission.into())
    }
}
