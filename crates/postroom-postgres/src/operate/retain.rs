//! Removing what is finished and old. What is finished only the functions in the database decide.

use std::time::Duration;

use postroom::{Part, Removed, Retention, StoreError, Sweep};
use tokio_postgres::Transaction;

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::session::OperatorSession;

/// Rows that one step looks at.
const STEP: i32 = 5_000;
/// One process at a time; all that wait give up their turn.
const ADVISORY_LOCK: i64 = 0x706f_7374_7265_7461;

/// One step of removing, in a transaction of its own.
pub(crate) async fn retain(
    connector: &Connector,
    retention: &Retention,
    sweep: &mut Sweep,
) -> Result<Removed, StoreError> {
    let failed = |error| store_error("remove what is finished and old", error);
    let Some(part) = sweep.parts.first().copied() else { return Ok(Removed::default()) };
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    let alone = tx.query_one("select pg_try_advisory_xact_lock($1)", &[&ADVISORY_LOCK]).await.map_err(failed)?;
    if !alone.try_get::<_, bool>(0).map_err(failed)? {
        // Another process is at it.
        sweep.parts.clear();
        return Ok(Removed::default());
    }
    let mut next = sweep.clone();
    let rows = match (part, retention.dead, retention.inbox, retention.audit) {
        (Part::Outbox, ..) => outbox(&tx, retention, &mut next).await,
        (Part::Dead, Some(age), ..) => aged(&tx, "retain_dead", age, &mut next).await,
        (Part::Inbox, _, Some(age), _) => aged(&tx, "retain_inbox", age, &mut next).await,
        (Part::Audit, _, _, Some(age)) => aged(&tx, "retain_audit", age, &mut next).await,
        _ => {
            next.next_part();
            Ok(0)
        }
    };
    let rows = rows.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    *sweep = next;
    let mut removed = Removed::default();
    removed.add(part, rows);
    Ok(removed)
}

async fn outbox(tx: &Transaction<'_>, retention: &Retention, sweep: &mut Sweep) -> Result<u64, tokio_postgres::Error> {
    let (patterns, ages, usual) = ages_by_topic(retention);
    let sql = "select r.removed, r.last, r.more, sweep.lane + 1 >= s.lanes
                 from postroom.settings s
                cross join (values ($1::smallint)) sweep (lane)
                cross join lateral postroom.retain_outbox(sweep.lane, $2, $3, array(select a * interval '1 second' from unnest($4::float8[]) with ordinality u (a, place) order by place),
                                                          $5::float8 * interval '1 second', $6) r";
    let row = tx.query_one(sql, &[&sweep.lane, &sweep.after, &patterns, &ages, &usual, &STEP]).await?;
    next_place(sweep, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?);
    Ok(row.try_get::<_, i64>(0)?.max(0) as u64)
}

/// Patterns of topics with the age of each in seconds, in their order, and the age of all other topics.
pub(super) fn ages_by_topic(retention: &Retention) -> (Vec<String>, Vec<Option<f64>>, Option<f64>) {
    let seconds = |age: Option<Duration>| age.map(|age| age.as_secs_f64());
    let (mut patterns, mut ages) = (Vec::new(), Vec::new());
    for topics in &retention.topics {
        for pattern in topics.topics.patterns() {
            patterns.push(pattern.clone());
            ages.push(seconds(topics.outbox));
        }
    }
    (patterns, ages, seconds(retention.outbox))
}

/// Behind the last row of a lane that was looked at, in the next lane, or at the end of the outbox.
pub(super) fn next_place(sweep: &mut Sweep, last: i64, more: bool, was_the_last: bool) {
    match (more, was_the_last) {
        (true, _) => sweep.after = last,
        (false, false) => (sweep.lane, sweep.after) = (sweep.lane.saturating_add(1), 0),
        (false, true) => sweep.next_part(),
    }
}

async fn aged(
    tx: &Transaction<'_>,
    function: &str,
    age: Duration,
    sweep: &mut Sweep,
) -> Result<u64, tokio_postgres::Error> {
    let sql = format!("select postroom.{function}($1::float8 * interval '1 second', $2)");
    let rows: i64 = tx.query_one(&sql, &[&age.as_secs_f64(), &STEP]).await?.try_get(0)?;
    if rows < i64::from(STEP) {
        sweep.next_part();
    }
    Ok(rows.max(0) as u64)
}
