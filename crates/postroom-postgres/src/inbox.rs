//! Admitting through tokio-postgres.

use std::time::Duration;

use async_trait::async_trait;
use postroom::{Admission, BoxError, Consumer, Deed, Inbox, MessageId, OnceError, StoreError};
use tokio_postgres::{Client, Transaction};

use crate::Postgres;
use crate::connect::Connector;
use crate::dead::audit;
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
            .execute(include_str!("sql/admit.sql"), &[&claimant(consumer), id.as_uuid()])
            .await
            .map_err(|error| store_error("claim a message in the inbox", error))?;
        Ok(if claimed == 1 { Admission::New } else { Admission::Duplicate })
    }
}

impl Postgres {
    /// Has the effect once: begins a transaction, claims `(consumer, id)`, runs `effect` if it was not claimed before, and
    /// commits. Ack the message after this returned, and only then. An error, a panic or a crash rolls back claim and
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
        #[cfg(seeded_bug = "inbox_after_effect")]
        {
            effect(&mut tx).await.map_err(effect_error)?;
            tx.commit().await.map_err(store("commit the effect"))?;
            let mut tx = client.transaction().await.map_err(store("begin the consumer's transaction"))?;
            let admission = self.admit(&mut tx, consumer, id).await?;
            tx.commit().await.map_err(store("commit the claim"))?;
            return Ok(admission);
        }
        #[cfg(not(seeded_bug = "inbox_after_effect"))]
        {
            let admission = self.admit(&mut tx, consumer, id).await?;
            if admission == Admission::New {
                effect(&mut tx).await.map_err(effect_error)?;
                // An effect that swallowed a database error left the transaction aborted, and the server answers COMMIT
                // with a silent rollback. This statement fails there instead.
                tx.batch_execute("select 1").await.map_err(store("have the effect: its transaction is aborted"))?;
            }
            tx.commit().await.map_err(store("commit the effect"))?;
            Ok(admission)
        }
    }
}

pub(crate) fn claimant(consumer: &Consumer) -> &str {
    if cfg!(seeded_bug = "inbox_key_without_consumer") { "anybody" } else { consumer.as_str() }
}

/// A database error inside the effect is sorted like one of ours: a deadlock there is transient too.
fn effect_error(error: BoxError) -> OnceError {
    match error.downcast::<tokio_postgres::Error>() {
        Ok(error) => OnceError::Store(store_error("have the effect", *error)),
        Err(error) => OnceError::Effect(error),
    }
}

/// Forgets messages that were processed so long ago, in steps of 10,000, each in its own transaction; `progress` hears how many
/// are gone. Refused below the redelivery horizon of `postroom.settings`.
pub async fn prune_inbox(
    connector: &Connector,
    older_than: Duration,
    deed: &Deed,
    mut progress: impl FnMut(u64),
) -> Result<u64, StoreError> {
    const STEP: i32 = 10_000;
    let failed = |error| store_error("prune the inbox", error);
    let mut client = connector.connect().await?;
    let mut pruned = 0;
    loop {
        let tx = client.transaction().await.map_err(failed)?;
        let sql = "select postroom.inbox_prune($1::float8 * interval '1 second', $2)";
        let step: i64 =
            tx.query_one(sql, &[&older_than.as_secs_f64(), &STEP]).await.map_err(failed)?.try_get(0).map_err(failed)?;
        if pruned == 0 && step > 0 {
            let conditions = format!("{{\"older_than_seconds\":{}}}", older_than.as_secs());
            audit(&tx, deed, "inbox.prune", &conditions, &[]).await.map_err(failed)?;
        }
        tx.commit().await.map_err(failed)?;
        pruned += step.max(0) as u64;
        progress(pruned);
        if step < i64::from(STEP) {
            return Ok(pruned);
        }
    }
}
