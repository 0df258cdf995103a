//! Who fills an inbox: one process at a time, by a lease.

use std::time::Duration;

use async_trait::async_trait;
use mysql_async::prelude::Queryable;
use mysql_async::{Error, Row, Transaction, params};
use postroom::{Consumer, FillerReport, FillerSeen, FillerStore, StoreError, Tenure};

use crate::Mysql;
use crate::connect::store_error;
use crate::log::get;

#[async_trait]
impl FillerStore for Mysql {
    async fn filler(tx: &mut Transaction<'_>, consumer: &Consumer) -> Result<Option<FillerSeen>, StoreError> {
        let sql = "select owner, epoch, lease_us, renewals, owner is null or expires_at <= utc_timestamp(6) as free
                     from postroom_inbox_fillers where consumer = ?";
        let row: Result<Option<Row>, Error> = tx.exec_first(sql, (consumer.as_str(),)).await;
        let seen = |mut row: Row| -> Result<FillerSeen, Error> {
            let row = &mut row;
            Ok(FillerSeen {
                owner: get(row, "owner")?,
                epoch: get(row, "epoch")?,
                lease: Duration::from_micros(get::<i64>(row, "lease_us")?.unsigned_abs()),
                renewal: get(row, "renewals")?,
                free: get(row, "free")?,
            })
        };
        row.and_then(|row| row.map(seen).transpose()).map_err(|error| store_error("find out who fills an inbox", error))
    }

    async fn take_inbox(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        owner: &str,
        lease: Duration,
        seen: Option<&FillerSeen>,
    ) -> Result<Option<Tenure>, StoreError> {
        let taken = take(tx, consumer.as_str(), owner, microseconds(lease), seen).await;
        let epoch = taken.map_err(|error| store_error("take an inbox to fill", error))?;
        Ok(epoch.map(|epoch| Tenure { owner: owner.to_owned(), epoch }))
    }

    async fn renew_inbox(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        tenure: &Tenure,
        lease: Duration,
        said: &FillerReport,
    ) -> Result<bool, StoreError> {
        let sql = "update postroom_inbox_fillers
                      set lease_us = :lease, expires_at = timestampadd(microsecond, :lease, utc_timestamp(6)), renewals = renewals + 1,
                          source = :source,
                          source_down_since = if(:down is null, null, coalesce(source_down_since, utc_timestamp(6))),
                          source_error = :down
                    where consumer = :consumer and owner = :owner and epoch = :epoch";
        let parameters = params! {
            "lease" => microseconds(lease), "source" => &said.source, "down" => &said.source_down,
            "consumer" => consumer.as_str(), "owner" => &tenure.owner, "epoch" => tenure.epoch
        };
        let renewed = tx.exec_drop(sql, parameters).await;
        renewed.map_err(|error| store_error("renew the lease of an inbox", error))?;
        Ok(tx.affected_rows() == 1)
    }

    async fn fence_inbox(tx: &mut Transaction<'_>, consumer: &Consumer, tenure: &Tenure) -> Result<bool, StoreError> {
        let sql = "select 1 from postroom_inbox_tenures where consumer = ? and epoch = ? lock in share mode";
        let held: Result<Option<i64>, Error> = tx.exec_first(sql, (consumer.as_str(), tenure.epoch)).await;
        let failed = |error| store_error("check who fills an inbox", error);
        if held.map_err(failed)?.is_none() {
            return Ok(false);
        }
        let sql = "select 1 from postroom_inbox_fillers where consumer = ? and owner = ? and epoch = ?";
        let held: Option<i64> =
            tx.exec_first(sql, (consumer.as_str(), &tenure.owner, tenure.epoch)).await.map_err(failed)?;
        Ok(held.is_some())
    }

    async fn leave_inbox(tx: &mut Transaction<'_>, consumer: &Consumer, tenure: &Tenure) -> Result<(), StoreError> {
        let sql =
            "update postroom_inbox_fillers set owner = null, expires_at = utc_timestamp(6), renewals = renewals + 1
                    where consumer = ? and owner = ? and epoch = ?";
        let left = tx.exec_drop(sql, (consumer.as_str(), &tenure.owner, tenure.epoch)).await;
        left.map_err(|error| store_error("give an inbox back", error))
    }
}

async fn take(
    tx: &mut Transaction<'_>,
    consumer: &str,
    owner: &str,
    lease: i64,
    seen: Option<&FillerSeen>,
) -> Result<Option<i64>, Error> {
    let sql =
        "insert into postroom_inbox_tenures (consumer, epoch) values (?, 0) on duplicate key update epoch = epoch";
    tx.exec_drop(sql, (consumer,)).await?;
    // Waits for the transactions of the filler before, and keeps others who take it over away.
    let sql = "select epoch from postroom_inbox_tenures where consumer = ? for update";
    let epoch: i64 = tx.exec_first(sql, (consumer,)).await?.unwrap_or_default();
    let sql = "select epoch, renewals from postroom_inbox_fillers where consumer = ? for update";
    let now: Option<(i64, i64)> = tx.exec_first(sql, (consumer,)).await?;
    if now != seen.map(|seen| (seen.epoch, seen.renewal)) {
        return Ok(None);
    }
    let next = epoch.max(now.map_or(0, |(epoch, _)| epoch)) + 1;
    let sql = "update postroom_inbox_tenures set epoch = ? where consumer = ?";
    tx.exec_drop(sql, (next, consumer)).await?;
    let sql = "insert into postroom_inbox_fillers (consumer, owner, epoch, lease_us, expires_at)
               values (:consumer, :owner, :epoch, :lease, timestampadd(microsecond, :lease, utc_timestamp(6)))
               on duplicate key update owner = values(owner), epoch = values(epoch), lease_us = values(lease_us),
                   expires_at = values(expires_at), renewals = renewals + 1, source = null, source_down_since = null,
                   source_error = null";
    let parameters = params! { "consumer" => consumer, "owner" => owner, "epoch" => next, "lease" => lease };
    tx.exec_drop(sql, parameters).await?;
    Ok(Some(next))
}

fn microseconds(lease: Duration) -> i64 {
    i64::try_from(lease.as_micros()).unwrap_or(i64::MAX).clamp(1, 366 * 24 * 3_600_000_000)
}
