//! What `postroom status` shows of a PostgreSQL store.

use postroom::{RouteStatus, StoreError, StoreStatus};

use crate::connect::Connector;
use crate::link::store_error;

/// The backlog is counted up to here, so that asking costs little however large it is.
const BACKLOG_COUNTED_MAX: i64 = 100_000;

/// Reads the state of the store. Costs index scans bounded by the count limit, and writes nothing.
pub(crate) async fn status(connector: &Connector) -> Result<StoreStatus, StoreError> {
    let client = connector.connect().await?;
    let failed = |error| store_error("read the status", error);
    let row = client.query_one(include_str!("sql/status_store.sql"), &[]).await.map_err(failed)?;
    let (version, outbox_rows): (i64, i64) = (row.get(0), row.get(1));
    let rows = client.query(include_str!("sql/status_routes.sql"), &[&BACKLOG_COUNTED_MAX]).await.map_err(failed)?;
    let routes = rows
        .iter()
        .map(|row| {
            let backlog: i64 = row.get(1);
            RouteStatus {
                route: row.get(0),
                backlog: backlog.min(BACKLOG_COUNTED_MAX),
                backlog_is_bound: backlog >= BACKLOG_COUNTED_MAX,
                oldest_unsent_seconds: row.get(2),
                parked: row.get(3),
                scheduled: row.get(4),
                dead: row.get(5),
                lanes: row.get(6),
                lanes_held: row.get(7),
                relays: row.get(8),
            }
        })
        .collect();
    Ok(StoreStatus { store: "postgres", schema_version: version, outbox_rows, routes })
}
