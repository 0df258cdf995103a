//! Admitting through rusqlite.

use postroom::{Admission, BoxError, Consumer, MessageId, OnceError, StoreError};
use rusqlite::{Connection, Transaction, TransactionBehavior, params};

use crate::Sqlite;
use crate::connect::store_error;
use crate::outbox::columns::ADMIT_SQL;

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

    /// Applies the effect once: claims `(consumer, id)`, runs `effect` if it was not claimed before, and commits both
    /// together. Ack the message only after this has returned. Blocks, as rusqlite does.
    pub fn once_blocking(
        &self,
        connection: &mut Connection,
        consumer: &Consumer,
        id: MessageId,
        effect: impl FnOnce(&Transaction<'_>) -> Result<(), BoxError>,
    ) -> Result<Admission, OnceError> {
        let tx = begin(connection)?;
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
