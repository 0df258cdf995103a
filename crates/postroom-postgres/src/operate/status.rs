//! What `postroom status` shows of a PostgreSQL store.

use postroom::{RouteStatus, SinkDown, StoreError, StoreStatus, UnroutedTopic};
use tokio_postgres::{Row, Transaction};

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::session::OperatorSession;
use crate::text::shown;

/// So many rows of the outbox are looked at in all, so that asking costs little however large the backlog is.
const BACKLOG_ROWS_MAX: i64 = 50_000;
/// So many parked and dead messages are counted in all, of each.
const OTHER_ROWS_MAX: i64 = 50_000;
/// Among so many rows of the outbox, the newest, topics are looked for that no route takes.
const NEWEST_ROWS_MAX: i64 = 5_000;
/// Relays that are alive and cannot publish.
const SINKS_DOWN: &str =
    "select route, owner, extract(epoch from clock_timestamp() - sink_down_since)::float8, coalesce(sink_error, '')
                            from postroom.relays where sink_down_since is not null and expires_at > clock_timestamp()
                           order by route, owner";
/// Every part of it is bounded by an index, which small tables would not make the planner use.
const BY_INDEX: &str = "set local enable_seqscan = off";

/// Reads the state of the store. Costs index scans bounded by the limits above, and writes nothing.
pub(crate) async fn status(connector: &Connector) -> Result<StoreStatus, StoreError> {
    let failed = |error| store_error("read the status", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    tx.batch_execute(BY_INDEX).await.map_err(failed)?;
    let row = tx.query_one(include_str!("sql/status_store.sql"), &[]).await.map_err(failed)?;
    let (version, outbox_rows): (Option<i64>, i64) = (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
    let outbox_rows_is_bound = row.try_get(2).map_err(failed)?;
    let rows =
        tx.query(include_str!("sql/status_routes.sql"), &[&BACKLOG_ROWS_MAX, &OTHER_ROWS_MAX]).await.map_err(failed)?;
    let downs = tx.query(SINKS_DOWN, &[]).await.map_err(failed)?;
    let unrouted = unrouted(&tx).await.map_err(failed)?;
    let routes: Result<Vec<RouteStatus>, tokio_postgres::Error> = rows
        .iter()
        .map(|row| {
            Ok(RouteStatus {
                route: shown(row, 0)?,
                backlog: row.try_get(1)?,
                backlog_is_bound: row.try_get(2)?,
                oldest_unsent_seconds: row.try_get(3)?,
                parked: row.try_get(4)?,
                parked_is_bound: row.try_get(5)?,
                scheduled: row.try_get(6)?,
                scheduled_is_bound: row.try_get(7)?,
                dead: row.try_get(8)?,
                dead_is_bound: row.try_get(9)?,
                lanes: row.try_get(10)?,
                lanes_held: row.try_get(11)?,
                relays: row.try_get(12)?,
                oldest_unread_seconds: row.try_get(13)?,
                sinks_down: downs
                    .iter()
                    .filter(|down| shown(down, 0).ok() == shown(row, 0).ok())
                    .map(|down| {
                        Ok(SinkDown { relay: shown(down, 1)?, since_seconds: down.try_get(2)?, error: shown(down, 3)? })
                    })
                    .collect::<Result<_, tokio_postgres::Error>>()?,
            })
        })
        .collect();
    let (routes, schema_version) = (routes.map_err(failed)?, version.unwrap_or_default());
    Ok(StoreStatus { store: "postgres", schema_version, outbox_rows, outbox_rows_is_bound, routes, unrouted })
}

/// Topics that no route takes, among the newest messages.
pub(crate) async fn unrouted_topics(connector: &Connector) -> Result<Vec<UnroutedTopic>, StoreError> {
    let failed = |error| store_error("look for topics that no route takes", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    tx.batch_execute(BY_INDEX).await.map_err(failed)?;
    unrouted(&tx).await.map_err(failed)
}

async fn unrouted(tx: &Transaction<'_>) -> Result<Vec<UnroutedTopic>, tokio_postgres::Error> {
    let rows = tx.query(include_str!("sql/unrouted.sql"), &[&NEWEST_ROWS_MAX]).await?;
    let topic = |row: &Row| {
        Ok(UnroutedTopic { topic: shown(row, 0)?, messages: row.try_get(1)?, oldest_seconds: row.try_get(2)? })
    };
    rows.iter().map(topic).collect()
}
