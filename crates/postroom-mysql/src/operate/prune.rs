//! Pruning the inbox.

use std::time::Duration;

use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use postroom::{Deed, StoreError};

use crate::desk::{Failed, begin};
use crate::operate::audit::audit;

/// Most rows that one step forgets.
const STEP: u64 = 5_000;

/// Forgets messages that were processed so long ago, one step in a transaction; returns how many, and whether there may be more.
/// Refused below the redelivery horizon of `postroom_settings`.
pub(crate) async fn prune_step(
    conn: &mut Conn,
    older_than: Duration,
    first: bool,
    deed: &Deed,
) -> Result<(u64, bool), Failed> {
    const WHAT: &str = "prune the inbox";
    let age = i64::try_from(older_than.as_micros()).unwrap_or(i64::MAX / 4);
    let horizon: Option<i64> = conn.query_first("select redelivery_horizon_us from postroom_settings").await?;
    let horizon = Duration::from_micros(horizon.unwrap_or(i64::MAX).unsigned_abs());
    if older_than < horizon {
        let source =
            format!("{older_than:?} is shorter than the redelivery horizon of {horizon:?}; nothing was pruned");
        return Err(StoreError::Refused { what: WHAT, source: source.into() }.into());
    }
    let mut tx = begin(conn).await?;
    // Whoever takes one of them in just now has it locked; it is passed by.
    let sql = "select i.consumer, i.message_id from postroom_inbox i
                where i.processed_at < timestampadd(microsecond, -?, utc_timestamp(6))
                  and not exists (select 1 from postroom_inbox_messages m where m.consumer = i.consumer and m.id = i.message_id)
                order by i.processed_at limit ? for update skip locked";
    let old: Vec<(String, String)> = tx.exec(sql, (age, STEP)).await?;
    let sql = "delete i from json_table(?, '$[*]' columns (consumer varchar(256) path '$[0]', id char(36) character set ascii path '$[1]')) n
                 straight_join postroom_inbox i force index (primary) on i.consumer = n.consumer and i.message_id = n.id";
    if !old.is_empty() {
        tx.exec_drop(sql, (crate::log::json(&old),)).await?;
        if first {
            let conditions = format!("{{\"older_than_seconds\":{}}}", older_than.as_secs());
            audit(&mut tx, deed, "inbox.prune", &conditions, &[] as &[&str]).await?;
        }
    }
    tx.commit().await?;
    Ok((old.len() as u64, old.len() as u64 == STEP))
}
