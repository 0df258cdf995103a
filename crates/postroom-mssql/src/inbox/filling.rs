//! Who fills an inbox: one process at a time, by a lease.

use std::time::Duration;

use async_trait::async_trait;
use postroom::{Consumer, FillerReport, FillerSeen, FillerStore, StoreError, Tenure};
use tiberius::Row;
use tiberius::error::Error;

use crate::Mssql;
use crate::connect::store_error;
use crate::inbox::Transaction;
use crate::sql::{distinct, from_now, get, named};

#[async_trait]
impl FillerStore for Mssql {
    async fn filler(tx: &mut Transaction<'_>, consumer: &Consumer) -> Result<Option<FillerSeen>, StoreError> {
        let sql = "select owner, epoch, lease_us, renewals, case when owner is null or expires_at <= sysutcdatetime() then 1 else 0 end as free
                     from postroom_inbox_fillers where consumer = @consumer";
        let rows = tx.rows(sql, named! { "consumer" => consumer.as_str() }).await;
        let seen = |row: &Row| -> Result<FillerSeen, Error> {
            Ok(FillerSeen {
                owner: get(row, "owner")?,
                epoch: get(row, "epoch")?,
                lease: Duration::from_micros(get::<i64>(row, "lease_us")?.unsigned_abs()),
                renewal: get(row, "renewals")?,
                free: get(row, "free")?,
            })
        };
        let seen = rows.and_then(|rows| rows.first().map(seen).transpose());
        seen.map_err(|error| store_error("find out who fills an inbox", error))
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
        let sql = format!(
            "update postroom_inbox_fillers
                set lease_us = @lease, expires_at = {}, renewals = renewals + 1, source = @source,
                    source_down_since = case when @down is not null then coalesce(source_down_since, sysutcdatetime()) end,
                    source_error = @down
              where consumer = @consumer and owner = @owner and epoch = @epoch",
            from_now("@lease")
        );
        let parameters = named! {
            "lease" => microseconds(lease), "source" => said.source.as_deref(), "down" => said.source_down.as_deref(),
            "consumer" => consumer.as_str(), "owner" => &tenure.owner, "epoch" => tenure.epoch
        };
        let renewed = tx.exec(&sql, parameters).await;
        Ok(renewed.map_err(|error| store_error("renew the lease of an inbox", error))? == 1)
    }

    async fn fence_inbox(tx: &mut Transaction<'_>, consumer: &Consumer, tenure: &Tenure) -> Result<bool, StoreError> {
        let parameters = named! { "consumer" => consumer.as_str(), "epoch" => tenure.epoch, "owner" => &tenure.owner };
        // Shared, until the transaction ends.
        let sql = "select 1 from postroom_inbox_tenures with (repeatableread, rowlock) where consumer = @consumer and epoch = @epoch";
        let failed = |error| store_error("check who fills an inbox", error);
        if tx.first::<i64>(sql, parameters.clone()).await.map_err(failed)?.is_none() {
            return Ok(false);
        }
        let sql =
            "select 1 from postroom_inbox_fillers where consumer = @consumer and owner = @owner and epoch = @epoch";
        Ok(tx.first::<i64>(sql, parameters).await.map_err(failed)?.is_some())
    }

    async fn leave_inbox(tx: &mut Transaction<'_>, consumer: &Consumer, tenure: &Tenure) -> Result<(), StoreError> {
        let sql =
            "update postroom_inbox_fillers set owner = null, expires_at = sysutcdatetime(), renewals = renewals + 1
                    where consumer = @consumer and owner = @owner and epoch = @epoch";
        let parameters = named! { "consumer" => consumer.as_str(), "epoch" => tenure.epoch, "owner" => &tenure.owner };
        tx.exec(sql, parameters).await.map(drop).map_err(|error| store_error("give an inbox back", error))
    }
}

async fn take(
    tx: &mut Transaction<'_>,
    consumer: &str,
    owner: &str,
    lease: i64,
    seen: Option<&FillerSeen>,
) -> Result<Option<i64>, Error> {
    distinct("consumer", consumer)?;
    let of = || named! { "consumer" => consumer };
    let sql = "insert into postroom_inbox_tenures (consumer, epoch)
               select @consumer, 0 where not exists (select 1 from postroom_inbox_tenures t with (updlock, holdlock) where t.consumer = @consumer)";
    tx.exec(sql, of()).await?;
    // Waits for the transactions of the filler before, and keeps others who take it over away.
    let sql = "select epoch from postroom_inbox_tenures with (updlock, rowlock) where consumer = @consumer";
    let epoch: i64 = tx.first(sql, of()).await?.unwrap_or_default();
    let sql = "select epoch, renewals from postroom_inbox_fillers with (updlock, rowlock) where consumer = @consumer";
    let now: Option<(i64, i64)> = tx.first(sql, of()).await?;
    if now != seen.map(|seen| (seen.epoch, seen.renewal)) {
        return Ok(None);
    }
    let next = epoch.max(now.map_or(0, |(epoch, _)| epoch)) + 1;
    let parameters = named! { "consumer" => consumer, "owner" => owner, "epoch" => next, "lease" => lease };
    // An exclusive lock, for which the transactions of the filler before are waited for.
    tx.exec("update postroom_inbox_tenures set epoch = @epoch where consumer = @consumer", parameters.clone()).await?;
    let sql = format!(
        "update postroom_inbox_fillers
            set owner = @owner, epoch = @epoch, lease_us = @lease, expires_at = {}, renewals = renewals + 1, source = null,
                source_down_since = null, source_error = null
          where consumer = @consumer",
        from_now("@lease")
    );
    if tx.exec(&sql, parameters.clone()).await? == 0 {
        let sql = format!(
            "insert into postroom_inbox_fillers (consumer, owner, epoch, lease_us, expires_at)
             values (@consumer, @owner, @epoch, @lease, {})",
            from_now("@lease")
        );
        tx.exec(&sql, parameters).await?;
    }
    Ok(Some(next))
}

fn microseconds(lease: Duration) -> i64 {
    crate::sql::microseconds(lease).max(1)
}
