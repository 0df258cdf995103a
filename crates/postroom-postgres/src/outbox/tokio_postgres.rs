//! Enqueueing through tokio-postgres.

use async_trait::async_trait;
use postroom::{EnqueueError, Message, Outbox};
use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;

use crate::Postgres;
use crate::outbox::columns::{Columns, ENQUEUE_SQL, ID_INDEX, all_written};

#[async_trait]
impl<'t> Outbox<Transaction<'t>> for Postgres {
    async fn enqueue(&self, tx: &mut Transaction<'t>, messages: &[Message]) -> Result<(), EnqueueError> {
        if messages.is_empty() {
            return Ok(());
        }
        let c = Columns::of(messages)?;
        let written = tx
            .execute(
                ENQUEUE_SQL,
                &[
                    &c.ids,
                    &c.topics,
                    &c.kinds,
                    &c.payloads,
                    &c.keys,
                    &c.routing_keys,
                    &c.content_types,
                    &c.headers,
                    &c.tenant_ids,
                    &c.aggregate_types,
                    &c.aggregate_ids,
                    &c.aggregate_versions,
                    &c.occurred_ats,
                    &c.delays,
                ],
            )
            .await
            .map_err(refused)?;
        all_written(written, messages)
    }
}

fn refused(error: tokio_postgres::Error) -> EnqueueError {
    let written_before = error.as_db_error().is_some_and(|db| {
        *db.code() == SqlState::UNIQUE_VIOLATION && db.constraint().is_some_and(|name| name == ID_INDEX)
    });
    if written_before {
        let id = error.as_db_error().and_then(|db| db.detail()).unwrap_or("unknown").to_owned();
        EnqueueError::AlreadyEnqueued { id, source: error.into() }
    } else {
        EnqueueError::Store(error.into())
    }
}
