//! Who fills an inbox, and messages that cannot be kept among those that wait.

use std::time::Duration;

use async_trait::async_trait;
use postroom::{BoxError, Consumer, FillerReport, FillerSeen, FillerStore, KEY_BYTES_MAX, Message, StoreError, Tenure};
use rusqlite::{Connection, OptionalExtension, params};

use crate::Sqlite;
use crate::connect::NOW;
use crate::inbox::receiving::MESSAGE;
use crate::inbox::transaction::SqliteTransaction;
use crate::outbox::columns::encoded;

#[async_trait]
impl FillerStore for Sqlite {
    async fn filler(tx: &mut SqliteTransaction<'_>, consumer: &Consumer) -> Result<Option<FillerSeen>, StoreError> {
        let sql = format!(
            "select owner, epoch, lease_ms, expires_ms, owner is null or expires_ms <= {NOW}
               from postroom_inbox_fillers where consumer = ?1"
        );
        let seen = |row: &rusqlite::Row<'_>| {
            Ok(FillerSeen {
                owner: row.get(0)?,
                epoch: row.get(1)?,
                lease: Duration::from_millis(row.get::<_, i64>(2)?.max(0) as u64),
                renewal: row.get(3)?,
                free: row.get(4)?,
            })
        };
        let consumer = consumer.clone();
        tx.stored("find out who fills an inbox", move |tx| tx.query_row(&sql, [consumer.as_str()], seen).optional())
            .await
    }

    async fn take_inbox(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        owner: &str,
        lease: Duration,
        seen: Option<&FillerSeen>,
    ) -> Result<Option<Tenure>, StoreError> {
        let (name, owned, seen, lease) = (consumer.clone(), owner.to_owned(), seen.cloned(), milliseconds(lease));
        let epoch = tx.stored("take an inbox to fill", move |tx| match seen {
            None => tx
                .query_row(
                    &format!(
                        "insert into postroom_inbox_fillers (consumer, owner, epoch, lease_ms, expires_ms)
                         values (?1, ?2, 1, ?3, {NOW} + ?3) on conflict (consumer) do nothing returning epoch"
                    ),
                    params![name.as_str(), owned, lease],
                    |row| row.get(0),
                )
                .optional(),
            Some(seen) => tx
                .query_row(
                    &format!(
                        "update postroom_inbox_fillers
                            set owner = ?2, epoch = epoch + 1, lease_ms = ?3, expires_ms = {NOW} + ?3,
                                source = null, source_down_ms = null, source_error = null
                          where consumer = ?1 and epoch = ?4 and expires_ms = ?5 returning epoch"
                    ),
                    params![name.as_str(), owned, lease, seen.epoch, seen.renewal],
                    |row| row.get(0),
                )
                .optional(),
        });
        Ok(epoch.await?.map(|epoch| Tenure { owner: owner.to_owned(), epoch }))
    }

    async fn renew_inbox(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        tenure: &Tenure,
        lease: Duration,
        said: &FillerReport,
    ) -> Result<bool, StoreError> {
        // Never the same end twice: a renewal is seen by its change.
        let sql = format!(
            "update postroom_inbox_fillers set lease_ms = ?4, expires_ms = {NOW} + ?4 + (expires_ms = {NOW} + ?4),
                    source = ?5, source_error = ?6, source_down_ms = case when ?6 is not null then coalesce(source_down_ms, {NOW}) end
              where consumer = ?1 and owner = ?2 and epoch = ?3"
        );
        let (consumer, tenure, said) = (consumer.clone(), tenure.clone(), said.clone());
        tx.stored("renew the lease of an inbox", move |tx| {
            let FillerReport { source, source_down } = said;
            let lease = milliseconds(lease);
            let parameters = params![consumer.as_str(), tenure.owner, tenure.epoch, lease, source, source_down];
            tx.execute(&sql, parameters).map(|renewed| renewed == 1)
        })
        .await
    }

    async fn fence_inbox(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        tenure: &Tenure,
    ) -> Result<bool, StoreError> {
        // The transaction is an immediate one: nobody else writes before it ends.
        let sql =
            "select exists (select 1 from postroom_inbox_fillers where consumer = ?1 and owner = ?2 and epoch = ?3)";
        let (consumer, tenure) = (consumer.clone(), tenure.clone());
        tx.stored("check who fills an inbox", move |tx| {
            tx.query_row(sql, params![consumer.as_str(), tenure.owner, tenure.epoch], |row| row.get(0))
        })
        .await
    }

    async fn leave_inbox(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        tenure: &Tenure,
    ) -> Result<(), StoreError> {
        let sql = format!(
            "update postroom_inbox_fillers set owner = null, expires_ms = {NOW}
              where consumer = ?1 and owner = ?2 and epoch = ?3"
        );
        let (consumer, tenure) = (consumer.clone(), tenure.clone());
        tx.stored("give an inbox back", move |tx| {
            tx.execute(&sql, params![consumer.as_str(), tenure.owner, tenure.epoch]).map(drop)
        })
        .await
    }
}

/// Whole milliseconds, one at least.
fn milliseconds(lease: Duration) -> i64 {
    i64::try_from(lease.as_millis()).unwrap_or(i64::MAX).clamp(1, 366 * 24 * 3_600_000)
}

/// The body of `ConsumerStore::keep_dead`. The letter has no seq of the messages that wait, so it gets a negative one of its
/// own; a key that is too long for the indexes there is not repeated as ordering_key.
pub(crate) fn keep_dead(tx: &Connection, consumer: &Consumer, message: &Message, error: &str) -> Result<(), BoxError> {
    let (headers, occurred, _) = encoded(message)?;
    let sql = format!(
        "insert into postroom_dead_consume (consumer, id, seq, attempts, cause, error, ordering_key, {MESSAGE})
         values (?1, ?2, (select min(0, coalesce(min(seq), 0)) - 1 from postroom_dead_consume where consumer = ?1), 0,
                 'permanent', ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)
             on conflict (consumer, id) do nothing"
    );
    tx.execute(
        &sql,
        params![
            consumer.as_str(),
            message.id.to_string(),
            error,
            message.ordering_key().filter(|key| key.len() <= KEY_BYTES_MAX),
            message.topic,
            message.kind,
            message.payload.as_ref(),
            message.key,
            message.routing_key,
            message.content_type,
            headers,
            message.tenant_id,
            message.aggregate_type,
            message.aggregate_id,
            message.aggregate_version,
            occurred,
        ],
    )?;
    Ok(())
}

/// Whether an error of the file speaks of the values that were to be kept.
pub(crate) fn is_about_values(error: &StoreError) -> bool {
    use rusqlite::ErrorCode;
    let StoreError::Refused { source, .. } = error else { return false };
    let Some(error) = source.downcast_ref::<rusqlite::Error>() else { return false };
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::TooBig | ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch)
    )
}
