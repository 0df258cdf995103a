//! Enqueueing and admitting through sqlx.

use async_trait::async_trait;
use postroom::{Admission, Consumer, EnqueueError, Inbox, Message, MessageId, Outbox, StoreError};
use sqlx::Transaction;

use crate::Sqlite;
use crate::outbox::columns::{ADMIT_SQL, ENQUEUE_SQL, ID_INDEX, all_written, stamped};

#[async_trait]
impl<'t> Outbox<Transaction<'t, sqlx::Sqlite>> for Sqlite {
    async fn enqueue(&self, tx: &mut Transaction<'t, sqlx::Sqlite>, messages: &[Message]) -> Result<(), EnqueueError> {
        for message in messages {
            message.check()?;
        }
        for message in messages {
            let (headers, occurred, delay) = stamped(message)?;
            let written = sqlx::query(ENQUEUE_SQL)
                .bind(message.id.to_string())
                .bind(&message.topic)
                .bind(&message.kind)
                .bind(message.payload.as_ref())
                .bind(&message.key)
                .bind(&message.routing_key)
                .bind(&message.content_type)
                .bind(headers)
                .bind(&message.tenant_id)
                .bind(&message.aggregate_type)
                .bind(&message.aggregate_id)
                .bind(message.aggregate_version)
                .bind(occurred)
                .bind(delay)
                .execute(&mut **tx)
                .await
                .map_err(|error| refused(message, error))?;
            all_written(written.rows_affected(), message)?;
        }
        Ok(())
    }
}

#[async_trait]
impl<'t> Inbox<Transaction<'t, sqlx::Sqlite>> for Sqlite {
    async fn admit(
        &self,
        tx: &mut Transaction<'t, sqlx::Sqlite>,
        consumer: &Consumer,
        id: MessageId,
    ) -> Result<Admission, StoreError> {
        let claimed =
            sqlx::query(ADMIT_SQL).bind(consumer.as_str()).bind(id.to_string()).execute(&mut **tx).await.map_err(
                |source| StoreError::Refused { what: "claim a message in the inbox", source: source.into() },
            )?;
        Ok(if claimed.rows_affected() == 1 { Admission::New } else { Admission::Duplicate })
    }
}

fn refused(message: &Message, error: sqlx::Error) -> EnqueueError {
    let written_before =
        error.as_database_error().is_some_and(|db| db.is_unique_violation() && db.message().contains(ID_INDEX));
    if written_before {
        EnqueueError::AlreadyEnqueued { id: message.id.to_string(), source: error.into() }
    } else {
        EnqueueError::Store(error.into())
    }
}
