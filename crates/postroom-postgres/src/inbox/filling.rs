//! Who fills an inbox, and messages that cannot be kept among those that wait; through tokio-postgres.

use std::time::Duration;

use async_trait::async_trait;
use postroom::{Consumer, FillerSeen, FillerStore, KEY_BYTES_MAX, Message, StoreError, Tenure};
use tokio_postgres::Transaction;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::Postgres;
use crate::inbox::receiving::{Parameter, execute, query};
use crate::log::row::get;
use crate::outbox::columns::{Columns, milliseconds};

#[async_trait]
impl FillerStore for Postgres {
    async fn filler(tx: &mut Transaction<'_>, consumer: &Consumer) -> Result<Option<FillerSeen>, StoreError> {
        let consumer = consumer.as_str();
        let what = "look who fills an inbox";
        let rows = query(tx, what, include_str!("sql/filler_seen.sql"), &[(&consumer, Type::TEXT)]).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        Ok(Some(FillerSeen {
            owner: get(row, "owner")?,
            epoch: get(row, "epoch")?,
            lease: Duration::from_millis(get::<i64>(row, "lease_ms")?.max(0) as u64),
            renewal: get(row, "renewal")?,
            free: get(row, "free")?,
        }))
    }

    async fn take_inbox(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        owner: &str,
        lease: Duration,
        seen: Option<&FillerSeen>,
    ) -> Result<Option<Tenure>, StoreError> {
        const WHAT: &str = "take an inbox to fill";
        let (consumer, lease) = (consumer.as_str(), milliseconds(lease));
        let mut parameters: Vec<Parameter<'_>> =
            vec![(&consumer, Type::TEXT), (&owner, Type::TEXT), (&lease, Type::INT8)];
        let rows = match seen {
            None => query(tx, WHAT, include_str!("sql/filler_first.sql"), &parameters).await?,
            Some(seen) => {
                parameters.push((&seen.epoch, Type::INT8));
                parameters.push((&seen.renewal, Type::INT8));
                query(tx, WHAT, include_str!("sql/filler_take.sql"), &parameters).await?
            }
        };
        let Some(row) = rows.first() else { return Ok(None) };
        Ok(Some(Tenure { owner: owner.to_owned(), epoch: get(row, "epoch")? }))
    }

    async fn renew_inbox(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        tenure: &Tenure,
        lease: Duration,
    ) -> Result<bool, StoreError> {
        let (consumer, lease) = (consumer.as_str(), milliseconds(lease));
        let parameters: [Parameter<'_>; 4] =
            [(&consumer, Type::TEXT), (&tenure.owner, Type::TEXT), (&tenure.epoch, Type::INT8), (&lease, Type::INT8)];
        let sql = include_str!("sql/filler_renew.sql");
        Ok(execute(tx, "renew the lease of an inbox", sql, &parameters).await? == 1)
    }

    async fn fence_inbox(tx: &mut Transaction<'_>, consumer: &Consumer, tenure: &Tenure) -> Result<bool, StoreError> {
        let consumer = consumer.as_str();
        let parameters: [Parameter<'_>; 3] =
            [(&consumer, Type::TEXT), (&tenure.owner, Type::TEXT), (&tenure.epoch, Type::INT8)];
        let sql = include_str!("sql/filler_fence.sql");
        Ok(query(tx, "check who fills an inbox", sql, &parameters).await?.len() == 1)
    }

    async fn leave_inbox(tx: &mut Transaction<'_>, consumer: &Consumer, tenure: &Tenure) -> Result<(), StoreError> {
        let consumer = consumer.as_str();
        let parameters: [Parameter<'_>; 3] =
            [(&consumer, Type::TEXT), (&tenure.owner, Type::TEXT), (&tenure.epoch, Type::INT8)];
        execute(tx, "give an inbox back", include_str!("sql/filler_leave.sql"), &parameters).await.map(drop)
    }
}

/// The body of `ConsumerStore::keep_dead`.
pub(crate) async fn keep_dead(
    tx: &Transaction<'_>,
    consumer: &Consumer,
    message: &Message,
    error: &str,
) -> Result<(), StoreError> {
    const WHAT: &str = "keep a received message as a dead one";
    let c = Columns::as_they_are(std::slice::from_ref(message))
        .map_err(|error| StoreError::Refused { what: WHAT, source: error.into() })?;
    let (consumer, longest, id) = (consumer.as_str(), KEY_BYTES_MAX as i32, Uuid::from(message.id));
    let (occurred, headers) = (c.occurred_ats.first().copied().flatten(), c.headers.first().cloned().flatten());
    let payload = message.payload.as_ref();
    let parameters: [Parameter<'_>; 16] = [
        (&consumer, Type::TEXT),
        (&error, Type::TEXT),
        (&longest, Type::INT4),
        (&id, Type::UUID),
        (&message.topic, Type::TEXT),
        (&message.kind, Type::TEXT),
        (&payload, Type::BYTEA),
        (&message.key, Type::TEXT),
        (&message.routing_key, Type::TEXT),
        (&message.content_type, Type::TEXT),
        (&headers, Type::TEXT),
        (&message.tenant_id, Type::TEXT),
        (&message.aggregate_type, Type::TEXT),
        (&message.aggregate_id, Type::TEXT),
        (&message.aggregate_version, Type::INT8),
        (&occurred, Type::INT8),
    ];
    execute(tx, WHAT, include_str!("sql/inbox_keep_dead.sql"), &parameters).await.map(drop)
}
