//! Admitting through rusqlite.

use std::time::Duration;

use postroom::{Admission, BoxError, Consumer, Deed, MessageId, OnceError, StoreError};
use rusqlite::{Connection, Transaction, TransactionBehavior, params};

use crate::Sqlite;
use crate::columns::ADMIT_SQL;
use crate::connect::store_error;
use crate::dead::audit;
use crate::source::NOW;

impl Sqlite {
    /// Claims `(consumer, id)` in the caller's transaction. Blocks, as rusqlite does. Begin the transaction immediate: the
    /// wait behind a concurrent claim is then the wait for the write lock, bounded by the busy timeout.
    pub fn admit_blocking(
        &self,
        tx: &Transaction<'_>,
        consumer: &Consumer,
        id: MessageId,
    ) -> Result<Admission, StoreError> {
        let claimed = tx
            .prepare_cached(ADMIT_SQL)
            .and_then(|mut statement| statement.execute(params![consumer.as_str(), id.to_string()]))
            .map_err(|error| store_error("claim a message in the inbox", error))?;
        Ok(if claimed == 1 { Admission::New } else { Admission::Duplicate })
    }

    /// Has the effect once: claims `(consumer, id)`, runs `effect` if it was not claimed before, and commits both
    /// together. Ack the message after this returned, and only then. Blocks, as rusqlite does.
    pub fn once_blocking(
        &self,
        connection: &mut Connection,
        consumer: &Consumer,
        id: MessageId,
        effect: impl FnOnce(&Transaction<'_>) -> Result<(), BoxError>,
    ) -> Result<Admission, OnceError> {
        let tx = begin(connection)?;
        if cfg!(seeded_bug = "inbox_after_effect") {
            effect(&tx).map_err(OnceError::Effect)?;
            commit(tx)?;
            let tx = begin(connection)?;
            let admission = self.admit_blocking(&tx, consumer, id)?;
            commit(tx)?;
            return Ok(admission);
        }
        let admission = self.admit_blocking(&tx, consumer, id)?;
        if admission == Admission::New {
            effect(&tx).map_err(OnceError::Effect)?;
        }
        commit(tx)?;
        Ok(admission)
    }
}

fn begin(connection: &mut Connection) -> Result<Transaction<'_>, OnceError> {
    connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(|error| store_error("begin the consumer's transaction", error).into())
}

fn commit(tx: Transaction<'_>) -> Result<(), OnceError> {
    tx.commit().map_err(|error| store_error("commit the effect", error).into())
}

/// Forgets messages that were processed so long ago, in steps of 10,000, each in its own transaction; `progress` hears how many
/// are gone. Refused below the redelivery horizon of `postroom_settings`.
pub fn prune_inbox(
    connection: &mut Connection,
    older_than: Duration,
    deed: &Deed,
    mut progress: impl FnMut(u64),
) -> Result<u64, StoreError> {
    const WHAT: &str = "prune the inbox";
    const STEP: usize = 10_000;
    let failed = |error| store_error(WHAT, error);
    let age = i64::try_from(older_than.as_millis()).unwrap_or(i64::MAX / 4);
    let horizon: i64 = connection
        .query_row("select redelivery_horizon_ms from postroom_settings", [], |row| row.get(0))
        .map_err(failed)?;
    if age < horizon {
        let horizon = Duration::from_millis(horizon.max(0) as u64);
        let source =
            format!("{older_than:?} is shorter than the redelivery horizon of {horizon:?}; nothing was pruned");
        return Err(StoreError::Refused { what: WHAT, source: source.into() });
    }
    let sql = format!(
        "delete from postroom_inbox where (consumer, message_id) in (
             select i.consumer, i.message_id from postroom_inbox i
              where i.processed_ms < {NOW} - ?1
                and not exists (select 1 from postroom_inbox_messages m where m.consumer = i.consumer and m.id = i.message_id)
              limit ?2)"
    );
    let mut pruned = 0;
    loop {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
        let step = tx.execute(&sql, params![age, STEP as i64]).map_err(failed)?;
        if pruned == 0 && step > 0 {
            let conditions = format!("{{\"older_than_seconds\":{}}}", older_than.as_secs());
            audit(&tx, deed, "inbox.prune", &conditions, &[]).map_err(failed)?;
        }
        tx.commit().map_err(failed)?;
        pruned += step as u64;
        progress(pruned);
        if step < STEP {
            return Ok(pruned);
        }
    }
}
