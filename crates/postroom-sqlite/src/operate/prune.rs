//! Pruning the inbox.

use std::time::Duration;

use postroom::{Deed, StoreError};
use rusqlite::{Connection, TransactionBehavior, params};

use crate::connect::{NOW, store_error};
use crate::operate::dead::audit;

/// Most rows that one step forgets.
const STEP: usize = 10_000;

/// Forgets messages that were processed so long ago, one step in a transaction; returns how many, and whether there may be more.
/// Refused below the redelivery horizon of `postroom_settings`.
pub(crate) fn prune_step(
    connection: &mut Connection,
    older_than: Duration,
    first: bool,
    deed: &Deed,
) -> Result<(u64, bool), StoreError> {
    const WHAT: &str = "prune the inbox";
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
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let step = tx.execute(&sql, params![age, STEP as i64]).map_err(failed)?;
    if first && step > 0 {
        let conditions = format!("{{\"older_than_seconds\":{}}}", older_than.as_secs());
        audit(&tx, deed, "inbox.prune", &conditions, &[]).map_err(failed)?;
    }
    tx.commit().map_err(failed)?;
    Ok((step as u64, step == STEP))
}
