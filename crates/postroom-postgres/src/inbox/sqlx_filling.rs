//! Who fills an inbox, and messages that cannot be kept among those that wait; through sqlx.

use std::time::Duration;

use async_trait::async_trait;
use postroom::{Consumer, FillerSeen, FillerStore, KEY_BYTES_MAX, Message, StoreError, Tenure};
use sqlx::Transaction;
use uuid::Uuid;

use crate::inbox::sqlx_receiving::{SqlxPostgres, changed, get, rows};
use crate::outbox::columns::{Columns, milliseconds};

#[async_trait]
impl FillerStore for SqlxPostgres {
    async fn filler(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
    ) -> Result<Option<FillerSeen>, StoreError> {
        let look = sqlx::query(include_str!("sql/filler_seen.sql")).bind(consumer.as_str());
        let found = rows(tx, "look who fills an inbox", look).await?;
        let Some(row) = found.first() else { return Ok(None) };
        Ok(Some(FillerSeen {
            owner: get(row, "owner")?,
            epoch: get(row, "epoch")?,
            lease: Duration::from_millis(get::<i64>(row, "lease_ms")?.max(0) as u64),
            renewal: get(row, "renewal")?,
            free: get(row, "free")?,
        }))
    }

    async fn take_inbox(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        owner: &str,
        lease: Duration,
        seen: Option<&FillerSeen>,
    ) -> Result<Option<Tenure>, StoreError> {
        let sql = match seen {
            None => include_str!("sql/filler_first.sql"),
            Some(_) => include_str!("sql/filler_take.sql"),
        };
        let mut query = sqlx::query(sql).bind(consumer.as_str()).bind(owner).bind(milliseconds(lease));
        if let Some(seen) = seen {
            query = query.bind(seen.epoch).bind(seen.renewal);
        }
        let taken = rows(tx, "take an inbox to fill", query).await?;
        let Some(row) = taken.first() else { return Ok(None) };
        Ok(Some(Tenure { owner: owner.to_owned(), epoch: get(row, "epoch")? }))
    }

    async fn renew_inbox(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        tenure: &Tenure,
        lease: Duration,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(include_str!("sql/filler_renew.sql"))
            .bind(consumer.as_str())
            .bind(&tenure.owner)
            .bind(tenure.epoch)
            .bind(milliseconds(lease));
        Ok(changed(tx, "renew the lease of an inbox", query).await? == 1)
    }

    async fn fence_inbox(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        tenure: &Tenure,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(include_str!("sql/filler_fence.sql"))
            .bind(consumer.as_str())
            .bind(&tenure.owner)
            .bind(tenure.epoch);
        Ok(rows(tx, "check who fills an inbox", query).await?.len() == 1)
    }

    async fn leave_inbox(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        tenure: &Tenure,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(include_str!("sql/filler_leave.sql"))
            .bind(consumer.as_str())
            .bind(&tenure.owner)
            .bind(tenure.epoch);
        changed(tx, "give an inbox back", query).await.map(drop)
    }
}

/// The body of `ConsumerStore::keep_dead`.
pub(crate) async fn keep_dead(
    tx: &mut Transaction<'_, sqlx::Postgres>,
    consumer: &Consumer,
    message: &Message,
    error: &str,
) -> Result<(), StoreError> {
    const WHAT: &str = "keep a received message as a dead one";
    let c = Columns::as_they_are(std::slice::from_ref(message))
        .map_err(|error| StoreError::Refused { what: WHAT, source: error.into() })?;
    let query = sqlx::query(include_str!("sql/inbox_keep_dead.sql"))
        .bind(consumer.as_str())
        .bind(error)
        .bind(KEY_BYTES_MAX as i32)
        .bind(Uuid::from(message.id))
        .bind(&message.topic)
        .bind(&message.kind)
        .bind(message.payload.as_ref())
        .bind(&message.key)
        .bind(&message.routing_key)
        .bind(&message.content_type)
        .bind(c.headers.first().cloned().flatten())
        .bind(&message.tenant_id)
        .bind(&message.aggregate_type)
        .bind(&message.aggregate_id)
        .bind(message.aggregate_version)
        .bind(c.occurred_ats.first().copied().flatten());
    changed(tx, WHAT, query).await.map(drop)
}
