//! What `postroom status` shows of a PostgreSQL store.

use postroom::{
    InboxStatus, LinkStatus, LinkTrouble, ReconciledStatus, RouteStatus, StoreError, StoreStatus, UnroutedTopic,
    WorkerStatus,
};
use tokio_postgres::{Row, Transaction};

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::session::OperatorSession;
use crate::text::{shown, shown_opt};

/// So many rows of the outbox are looked at in all, so that asking costs little however large the backlog is.
const BACKLOG_ROWS_MAX: i64 = 50_000;
/// So many parked and dead messages are counted in all, of each.
const OTHER_ROWS_MAX: i64 = 50_000;
/// Among so many rows of the outbox, the newest, topics are looked for that no route takes.
const NEWEST_ROWS_MAX: i64 = 5_000;
/// Every part of it is bounded by an index, which small tables would not make the planner use.
const BY_INDEX: &str = "set local enable_seqscan = off";

/// The newest result of each comparison, of those that count. What a clock that was ahead has dated does not.
const RECONCILED: &str = "
    select r.name, extract(epoch from clock_timestamp() - r.at)::float8, r.missing, r.strangers, r.days,
           (r.result->>'every_seconds')::float8, coalesce((r.result->>'not_compared')::bigint, 0),
           (select count(*) from jsonb_array_elements(r.result->'consumers') c where c->>'trouble' is not null)
               + case when r.result->>'business_trouble' is null then 0 else 1 end
               + case when r.result->>'changes_trouble' is null then 0 else 1 end
               + case when r.result->>'trouble' is null then 0 else 1 end,
           coalesce((r.result->>'unwritten')::bigint, 0)
      from (select distinct n.name from postroom.reconciliations n order by n.name limit 100) n
     cross join lateral (select * from postroom.reconciliations r
                          where r.name = n.name and r.at <= clock_timestamp()
                          order by r.at desc limit 1) r
     order by r.name";

/// Whether a relay of these routes would find something to do. A few index look-ups for each lane.
pub(crate) async fn work_waits(connector: &Connector, routes: &[String]) -> Result<bool, StoreError> {
    let failed = |error| store_error("look whether something is to be sent", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    tx.batch_execute(BY_INDEX).await.map_err(failed)?;
    let row = tx.query_one(include_str!("sql/work_waits.sql"), &[&routes]).await.map_err(failed)?;
    row.try_get(0).map_err(failed)
}

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
    let relays = tx.query(include_str!("sql/status_relays.sql"), &[]).await.map_err(failed)?;
    let relays: Vec<(String, WorkerStatus)> = relays.iter().map(relay).collect::<Result<_, _>>().map_err(failed)?;
    let inboxes = tx.query(include_str!("sql/status_inboxes.sql"), &[&OTHER_ROWS_MAX]).await.map_err(failed)?;
    let inboxes = inboxes.iter().map(inbox).collect::<Result<_, _>>().map_err(failed)?;
    let unrouted = unrouted(&tx).await.map_err(failed)?;
    let routes = rows.iter().map(|row| route(row, &relays)).collect::<Result<_, _>>().map_err(failed)?;
    let schema_version = version.unwrap_or_default();
    let rows = tx.query(RECONCILED, &[]).await.map_err(failed)?;
    let reconciled = rows.iter().map(reconciled).collect::<Result<_, _>>().map_err(failed)?;
    Ok(StoreStatus {
        store: "postgres",
        schema_version,
        outbox_rows,
        outbox_rows_is_bound,
        routes,
        inboxes,
        unrouted,
        reconciled,
    })
}

fn reconciled(row: &Row) -> Result<ReconciledStatus, tokio_postgres::Error> {
    Ok(ReconciledStatus {
        name: shown(row, 0)?,
        seconds_ago: row.try_get(1)?,
        missing: row.try_get(2)?,
        strangers: row.try_get(3)?,
        days: row.try_get(4)?,
        every_seconds: row.try_get(5)?,
        not_compared: row.try_get(6)?,
        troubles: row.try_get(7)?,
        unwritten: row.try_get(8)?,
    })
}

fn route(row: &Row, relays: &[(String, WorkerStatus)]) -> Result<RouteStatus, tokio_postgres::Error> {
    let name = shown(row, 0)?;
    let (unread, unread_is_bound): (i64, bool) = (row.try_get(1)?, row.try_get(2)?);
    let (parked, parked_is_bound): (i64, bool) = (row.try_get(4)?, row.try_get(5)?);
    let (scheduled, scheduled_is_bound): (i64, bool) = (row.try_get(6)?, row.try_get(7)?);
    // Where there are more delayed ones than were counted, nobody knows how many of the parked ones are not.
    let overdue = if scheduled_is_bound { 0 } else { (parked - scheduled).max(0) };
    Ok(RouteStatus {
        backlog: unread + overdue,
        backlog_is_bound: unread_is_bound || parked_is_bound || scheduled_is_bound,
        oldest_unsent_seconds: row.try_get(3)?,
        oldest_unread_seconds: row.try_get(12)?,
        parked,
        parked_is_bound,
        scheduled,
        scheduled_is_bound,
        retrying: row.try_get(13)?,
        retrying_is_bound: row.try_get(14)?,
        last_failure: shown_opt(row, 15)?,
        dead: row.try_get(8)?,
        dead_is_bound: row.try_get(9)?,
        lanes: row.try_get(10)?,
        lanes_held: row.try_get(11)?,
        relays: relays.iter().filter(|(route, _)| *route == name).map(|(_, relay)| relay.clone()).collect(),
        route: name,
    })
}

fn relay(row: &Row) -> Result<(String, WorkerStatus), tokio_postgres::Error> {
    let trouble = shown_opt(row, 8)?;
    let trouble = trouble
        .map(|error| {
            let blocked = row.try_get::<_, Option<bool>>(6)?.unwrap_or_default();
            Ok::<_, tokio_postgres::Error>(LinkTrouble { blocked, since_seconds: since(row, 7)?, error })
        })
        .transpose()?;
    let worker = WorkerStatus {
        name: shown(row, 1)?,
        alive: row.try_get(2)?,
        seen_seconds_ago: row.try_get(3)?,
        lanes: row.try_get(4)?,
        link: LinkStatus { name: shown_opt(row, 5)?, trouble },
    };
    Ok((shown(row, 0)?, worker))
}

fn since(row: &Row, column: usize) -> Result<f64, tokio_postgres::Error> {
    Ok(row.try_get::<_, Option<f64>>(column)?.unwrap_or_default())
}

fn inbox(row: &Row) -> Result<InboxStatus, tokio_postgres::Error> {
    let trouble = shown_opt(row, 12)?;
    let trouble = trouble
        .map(|error| {
            Ok::<_, tokio_postgres::Error>(LinkTrouble { blocked: false, since_seconds: since(row, 11)?, error })
        })
        .transpose()?;
    let alive = row.try_get::<_, Option<bool>>(8)?.unwrap_or_default();
    let seen_seconds_ago = row.try_get(9)?;
    let link = LinkStatus { name: shown_opt(row, 10)?, trouble };
    // One that gave the inbox back is nobody.
    let filler =
        shown_opt(row, 7)?.map(|name| WorkerStatus { name, alive, seen_seconds_ago, lanes: i64::from(alive), link });
    Ok(InboxStatus {
        consumer: shown(row, 0)?,
        waiting: row.try_get(1)?,
        retrying: row.try_get(2)?,
        waiting_is_bound: row.try_get(3)?,
        last_failure: shown_opt(row, 13)?,
        oldest_seconds: row.try_get(4)?,
        dead: row.try_get(5)?,
        dead_is_bound: row.try_get(6)?,
        filler,
    })
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
