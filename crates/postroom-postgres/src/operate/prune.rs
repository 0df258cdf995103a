//! Pruning the inbox.

use std::time::Duration;

use postroom::{Deed, StoreError};
use tokio_postgres::types::ToSql;

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::dead::audit;
use crate::operate::session::{OperatorSession, within};

/// Forgets messages that were processed so long ago, in steps of 10,000, each in its own transaction; `progress` hears how many
/// are gone. Refused below the redelivery horizon of `postroom.settings`.
pub(crate) async fn prune_inbox(
    connector: &Connector,
    older_than: Duration,
    deed: &Deed,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<u64, StoreError> {
    const STEP: i32 = 10_000;
    let failed = |error| store_error("prune the inbox", error);
    let mut session = OperatorSession::open(connector).await?;
    let mut pruned = 0;
    loop {
        let stepped = async {
            let tx = session.deed().await?;
            let sql = "select postroom.inbox_prune($1::float8 * interval '1 second', $2)";
            let parameters: [&(dyn ToSql + Sync); 2] = [&older_than.as_secs_f64(), &STEP];
            let step: i64 = tx.query_one(sql, &parameters).await.map_err(failed)?.try_get(0).map_err(failed)?;
            if pruned == 0 && step > 0 {
                let conditions = format!("{{\"older_than_seconds\":{}}}", older_than.as_secs());
                audit(&tx, deed, "inbox.prune", &conditions, &[]).await.map_err(failed)?;
            }
            tx.commit().await.map_err(failed)?;
            Ok(step)
        };
        let step = within(connector, "prune the inbox", stepped).await?;
        pruned += step.max(0) as u64;
        progress(pruned);
        if step < i64::from(STEP) {
            return Ok(pruned);
        }
    }
}
