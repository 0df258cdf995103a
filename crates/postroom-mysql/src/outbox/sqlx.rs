//! Enqueueing and admitting through sqlx.

use async_trait::async_trait;
use postroom::{Admission, Consumer, EnqueueError, Inbox, Message, MessageId, Outbox, StoreError};
use sqlx::Transaction;

use crate::Mysql;
use crate::inbox::ADMIT_SQL;
use crate::outbox::columns::{ENQUEUE_SQL, ID_INDEX, Stamped, occurred_us};

#[async_trait]
impl<'t> Outbox<Transaction<'t, sqlx::MySql>> for Mysql {
    async fn enqueue(&self, tx: &mut Transaction<'t, sqlx::MySql>, messages: &[Message]) -> Result<(), EnqueueError> {
        for message in messages {
            message.check()?;
        }
        for message in messages {
            let Stamped { headers, delay_us } = Stamped::of(message)?;
            sqlx::query(ENQUEUE_SQL)
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
                .bind(occurred_us(message))
                .bind(delay_us)
                .execute(&mut **tx)
                .await
                .map_err(|error| refused(message, error))?;
        }
        Ok(())
    }
}

#[async_trait]
impl<'t> Inbox<Transaction<'t, sqlx::MySql>> for Mysql {
    async fn admit(
        &self,
        tx: &mut Transaction<'t, sqlx::MySql>,
        consumer: &Consumer,
        id: MessageId,
    ) -> Result<Admission, StoreError> {
        match sqlx::query(ADMIT_SQL).bind(consumer.as_str()).bind(id.to_string()).execute(&mut **tx).await {
            Ok(_) => Ok(Admission::New),
            Err(error) if error.as_database_error().is_some_and(|db| db.is_unique_violation()) => {
                Ok(Admission::Duplicate)
            }
            Err(source) => Err(StoreError::Refused { what: "claim a message in the inbox", source: source.into() }),
        }
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
