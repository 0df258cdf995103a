//! The consumer: totals by customer in its own database, each message once.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use postroom::{Answer, Arrival, Bound, Consumer, Receipt, Subscription, Unavailable};
use postroom_consumer::{Handle, HandlerError, Handlers, Incoming, Receiver};
use postroom_sqlite::{Sqlite, SqliteSession, SqliteTransaction, connect};
use rusqlite::params;
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

/// The consumer on a queue; one that is to crash does so once, after a commit and before the ack.
pub fn receiver(
    files: &Files,
    subscription: impl Subscription + 'static,
    crash: Option<oneshot::Sender<()>>,
) -> Result<Receiver<Sqlite>, Failure> {
    let consumer = Consumer::new("order-totals").map_err(|error| Failure::of(exit::FAILURE, &error))?;
    let handlers = Handlers::new().on("order.placed", AddsUp);
    let subscription = DiesAtAck { subscription, crash: Mutex::new(crash) };
    let path = files.projection.clone();
    let receiver = Receiver::new(Arc::new(subscription), consumer, handlers, move || SqliteSession::new(&path));
    // SQLite has one writer at a time.
    Ok(receiver.map_err(|error| Failure::of(exit::FAILURE, &error))?.concurrency(1))
}

/// Adds orders up.
struct AddsUp;

#[async_trait]
impl Handle<Sqlite, OrderPlaced> for AddsUp {
    async fn handle(&self, tx: &mut SqliteTransaction<'_>, order: &Incoming<OrderPlaced>) -> Result<(), HandlerError> {
        let (customer, cents, id) = (order.body.customer.clone(), order.body.cents, order.message.id.to_string());
        tx.run(move |tx| {
            tx.execute(
                "insert into totals values (?1, 1, ?2)
                     on conflict (customer) do update set orders = orders + 1, cents = cents + excluded.cents",
                params![customer, cents],
            )?;
            tx.execute(
                "insert into effects values (?1, 1) on conflict (message_id) do update set times = times + 1",
                [id],
            )
        })
        .await?;
        Ok(())
    }
}

/// A subscription whose process dies instead of acking, where it is told to.
struct DiesAtAck<S> {
    subscription: S,
    crash: Mutex<Option<oneshot::Sender<()>>>,
}

#[async_trait]
impl<S: Subscription> Subscription for DiesAtAck<S> {
    async fn receive(&self, max: Bound) -> Result<Arrival, Unavailable> {
        self.subscription.receive(max).await
    }

    async fn settle(&self, answers: &[(Receipt, Answer)]) -> Result<(), Unavailable> {
        let crash = self.crash.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(crash) = crash {
            let _ = crash.send(());
            // Dead: the ack is never sent; the demo ends this consumer.
            std::future::pending::<()>().await;
        }
        self.subscription.settle(answers).await
    }

    async fn close(&self) {
        self.subscription.close().await;
    }
}
