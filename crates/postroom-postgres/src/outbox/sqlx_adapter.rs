//! Enqueueing and admitting through sqlx, whichever version `super` names. sqlx is never the relay's own driver (docs/decisions/0003).

use async_trait::async_trait;
use postroom::{Admission, Consumer, EnqueueError, Inbox, Message, MessageId, Outbox, StoreError};
use uuid::Uuid;

use super::sqlx::{self, Transaction};
use crate::Postgres;
use crate::outbox::columns::{Columns, ENQUEUE_SQL, ID_INDEX, all_written};

#[async_trait]
impl<'t> Outbox<Transaction<'t, sqlx::Postgres>> for Postgres {
    async fn enqueue(
        &self,
        tx: &mut Transaction<'t, sqlx::Postgres>,
        messages: &[Message],
    ) -> Result<(), EnqueueError> {
        if messages.is_empty() {
            return Ok(());
        }
        let c = Columns::of(messages)?;
        let written = sqlx::query(ENQUEUE_SQL)
            .bind(&c.ids)
            .bind(&c.topics)
            .bind(&c.kinds)
            .bind(&c.payloads)
            .bind(&c.keys)
            .bind(&c.routing_keys)
            .bind(&c.content_types)
            .bind(&c.headers)
            .bind(&c.tenant_ids)
            .bind(&c.aggregate_types)
            .bind(&c.aggregate_ids)
            .bind(&c.aggregate_versions)
            .bind(&c.occurred_ats)
            .bind(&c.delays)
            .execute(&mut **tx)
            .await
            .map_err(refused)?;
        all_written(written.rows_affected(), messages)
    }
}

#[async_trait]
impl<'t> Inbox<Transaction<'t, sqlx::Postgres>> for Postgres {
    async fn admit(
        &self,
        tx: &mut Transaction<'t, sqlx::Postgres>,
        consumer: &Consumer,
        id: MessageId,
    ) -> Result<Admission, StoreError> {
        let claimed = sqlx::query(include_str!("../inbox/sql/admit.sql"))
            .bind(consumer.as_str())
            .bind(Uuid::from(id))
            .execute(&mut **tx)
            .await
            .map_err(|source| StoreError::Refused { what: "claim a message in the inbox", source: source.into() })?;
        if claimed.rows_affected() == 1 {
            return Ok(Admission::New);
        }
        let noted = sqlx::query(include_str!("../inbox/sql/duplicate_found.sql")).execute(&mut **tx).await;
        noted.map_err(|source| StoreError::Refused { what: "claim a message in the inbox", source: source.into() })?;
        Ok(Admission::Duplicate)
    }
}

fn refused(error: sqlx::Error) -> EnqueueError {
    let written_before =
        error.as_database_error().is_some_and(|db| db.is_unique_violation() && db.constraint() == Some(ID_INDEX));
    if written_before {
        EnqueueError::AlreadyEnqueued { id: "(see the cause)".to_owned(), source: error.into() }
    } else {
        EnqueueError::Store(error.into())
    }
}
