//! Admitting through tokio-postgres.

use async_trait::async_trait;
use postroom::{Admission, BoxError, Consumer, Inbox, MessageId, OnceError, StoreError};
use tokio_postgres::{Client, Transaction};

use crate::Postgres;
use crate::link::store_error;

#[async_trait]
impl<'t> Inbox<Transaction<'t>> for Postgres {
    async fn admit(
        &self,
        tx: &mut Transaction<'t>,
        consumer: &Consumer,
        id: MessageId,
    ) -> Result<Admission, StoreError> {
        let claimed = tx
            .execute(include_str!("sql/admit.sql"), &[&consumer.as_str(), id.as_uuid()])
            .await
            .map_err(|error| store_error("claim a message in the inbox", error))?;
        if claimed == 1 {
            return Ok(Admission::New);
        }
        let noted = tx.execute(include_str!("sql/duplicate_found.sql"), &[]).await;
        noted.map_err(|error| store_error("claim a message in the inbox", error))?;
        Ok(Admission::Duplicate)
    }
}

impl Postgres {
    /// Applies the effect once: begins a transaction, claims `(consumer, id)`, runs `effect` if it was not claimed before, and
    /// commits. Ack the message only after this has returned. An error, a panic or a crash rolls back claim and
    /// effect together, and so does dropping the future.
    ///
    /// `lock_timeout` of the connection bounds the wait behind a concurrent duplicate; it counts as transient, like a
    /// serialization failure.
    pub async fn once(
        &self,
        client: &mut Client,
        consumer: &Consumer,
        id: MessageId,
        effect: impl AsyncFnOnce(&mut Transaction<'_>) -> Result<(), BoxError>,
    ) -> Result<Admission, OnceError> {
        let store = |what| move |error| OnceError::Store(store_error(what, error));
        let mut tx = client.transaction().await.map_err(store("begin the consumer's transaction"))?;
        let admission = self.admit(&mut tx, consumer, id).await?;
        if admission == Admission::New {
            effect(&mut tx).await.map_err(effect_error)?;
        }
        // An effect that swallowed a database error left the transaction aborted, and the server answers COMMIT
        // with a silent rollback. This fails there instead.
        let surely = tx.batch_execute(include_str!("sql/commit_surely.sql")).await;
        surely.map_err(store("apply the effect: its transaction is aborted"))?;
        tx.commit().await.map_err(store("commit the effect"))?;
        Ok(admission)
    }
}

/// A database error inside the effect is sorted like one of ours: a deadlock there is transient too.
fn effect_error(error: BoxError) -> OnceError {
    match error.downcast::<tokio_postgres::Error>() {
        Ok(error) => OnceError::Store(store_error("apply the effect", *error)),
        Err(error) => OnceError::Effect(error),
    }
}
