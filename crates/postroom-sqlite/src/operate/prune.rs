//! Pruning the inbox.

use std::time::Duration;

use postroom::{Deed, StoreError};
use rusqlite::{Connection, TransactionBehavior, params};

use crate::connect::{NOW, store_error};
use crate::operate::dead::audit;

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
