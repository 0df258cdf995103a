//! Pruning the inbox.

use std::time::Duration;

use postroom::{Deed, StoreError};

use crate::conn::Conn;
use crate::desk::{Failed, begin};
use crate::operate::audit::audit;
use crate::sql::{age, ago, json, named};

/// Most rows that one step forgets.
const STEP: usize = 5_000;

/// Forgets messages that were processed so long ago, one step in a transaction; returns how many, and whether there may be more.
/// Refused below the redelivery horizon of `postroom_settings`.
pub(crate) async fn prune_step(
    conn: &mut Conn,
    older_than: Duration,
    first: bool,
    deed: &Deed,
) -> Result<(u64, bool), Failed> {
    const WHAT: &str = "prune the inbox";
    let horizon: Option<i64> = conn.first("select redelivery_horizon_us from postroom_settings", named! {}).await?;
    let horizon = Duration::from_micros(horizon.unwrap_or(i64::MAX).unsigned_abs());
    if older_than < horizon {
        let source =
            format!("{older_than:?} is shorter than the redelivery horizon of {horizon:?}; nothing was pruned");
        return Err(StoreError::Refused { what: WHAT, source: source.into() }.into());
    }
    let tx = begin(conn).await?;
    // Whoever takes one of them in just now has it locked; it is passed by.
    let sql = format!(
        "select top (@most) i.consumer, i.message_id from postroom_inbox i with (updlock, rowlock, readcommittedlock, readpast)
          where i.processed_at < {}
            and not exists (select 1 from postroom_inbox_messages m where m.consumer = i.consumer and m.id = i.message_id)
          order by i.processed_at",
        ago("@age")
    );
    let old: Vec<(String, String)> = tx.query(&sql, named! { "most" => STEP, "age" => age(older_than) }).await?;
    let sql = "delete i
                 from openjson(@old) with (consumer nvarchar(255) '$[0]', id uniqueidentifier '$[1]') n
                 join postroom_inbox i with (rowlock) on i.consumer = n.consumer collate Latin1_General_100_BIN2 and i.message_id = n.id
               option (loop join, force order)";
    if !old.is_empty() {
        tx.exec(sql, named! { "old" => json(&old) }).await?;
        if first {
            let conditions = format!("{{\"older_than_seconds\":{}}}", older_than.as_secs());
            audit(tx, deed, "inbox.prune", &conditions, &[] as &[&str]).await?;
        }
    }
    tx.commit().await?;
    Ok((old.len() as u64, old.len() == STEP))
}
