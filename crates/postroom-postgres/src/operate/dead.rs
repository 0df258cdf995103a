//! What operators do about dead letters. Every deed and the audit row about it are one transaction.

use std::collections::HashSet;

use postroom::{
    BoxError, Cause, DeadCursor, DeadDeed, DeadFilter, DeadLetter, Deed, Side, StoreError, headers_from_json,
};
use tokio_postgres::{Row, Transaction};

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::session::{OperatorSession, within};
use crate::text::{shown, shown_opt, word};

/// Dead letters by filter, oldest first, at most `limit`.
pub(crate) async fn dead_letters(
    connector: &Connector,
    after: Option<&DeadCursor>,
    side: Side,
    filter: &DeadFilter,
    limit: i64,
) -> Result<Vec<DeadLetter>, StoreError> {
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    chosen(&tx, after, side, filter, limit).await
}

/// The payload of one dead letter.
pub(crate) async fn dead_payload(
    connector: &Connector,
    side: Side,
    route: &str,
    seq: i64,
) -> Result<Option<Vec<u8>>, StoreError> {
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let sql = match side {
        Side::Out => "select payload from postroom.dead_letters where route = $1 and seq = $2",
        Side::In => "select payload from postroom.dead_consume where consumer = $1 and seq = $2",
    };
    let row = tx.query_opt(sql, &[&route, &seq]).await.map_err(|error| store_error("read a dead letter", error))?;
    Ok(row.map(|row| row.get(0)))
}

/// Gives dead letters back to their relay or consumer, or deletes them. Returns those that it was done to. What is given back is so
/// a thousand at a time, each step with an audit row: relays wait while a step holds their lanes. An error leaves the steps before
/// it done, and says so. A letter that died a moment ago, and that its lane's position has not passed, is not discarded, because a
/// crash would bring it back and send it.
pub(crate) async fn act_on_dead(
    connector: &Connector,
    what: DeadDeed,
    side: Side,
    filter: &DeadFilter,
    limit: i64,
    deed: &Deed,
    progress: &mut (dyn FnMut(usize) + Send),
) -> Result<Vec<DeadLetter>, StoreError> {
    let step_max = if what == DeadDeed::Retry { RETRY_STEP } else { limit };
    let mut done = Vec::new();
    loop {
        let step = (limit - done.len() as i64).min(step_max);
        if step <= 0 {
            return Ok(done);
        }
        let acted = match side {
            Side::Out => within(connector, FAILED, act(connector, what, filter, step, deed)).await,
            Side::In => within(connector, FAILED, act_in(connector, what, filter, step, deed)).await,
        };
        match acted {
            Ok(letters) => {
                let last = what == DeadDeed::Discard || (letters.len() as i64) < step;
                done.extend(letters);
                progress(done.len());
                if last {
                    return Ok(done);
                }
            }
            Err(error) if done.is_empty() => return Err(error),
            Err(error) => {
                let source = format!("{} were already given back, see postroom.audit: {error}", done.len()).into();
                return Err(StoreError::Refused { what: "give the rest of the dead letters back", source });
            }
        }
    }
}

/// Most dead letters that are given back in one transaction.
const RETRY_STEP: i64 = 1000;

/// Deeds take turns: two operators at once would otherwise both see the same letters and both report them. An advisory lock, because a
/// lock of the table would need rights to change what is in it. Any number; all that matters is that every postroom takes the same.
pub(crate) const ONE_OPERATOR: &str = "select pg_advisory_xact_lock(8100113390523507567)";
const FAILED: &str = "act on dead letters; nothing was changed";

async fn act_in(
    connector: &Connector,
    what: DeadDeed,
    filter: &DeadFilter,
    limit: i64,
    deed: &Deed,
) -> Result<Vec<DeadLetter>, StoreError> {
    let failed = |error| store_error(FAILED, error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    tx.batch_execute(ONE_OPERATOR).await.map_err(failed)?;
    let letters = chosen(&tx, None, Side::In, filter, limit).await?;
    if letters.is_empty() {
        return Ok(letters);
    }
    let consumers: Vec<&str> = letters.iter().map(|letter| letter.route.as_str()).collect();
    let seqs: Vec<i64> = letters.iter().map(|letter| letter.seq).collect();
    let sql = if what == DeadDeed::Retry {
        include_str!("sql/dead_in_retry.sql")
    } else {
        include_str!("sql/dead_in_discard.sql")
    };
    tx.execute(sql, &[&consumers, &seqs]).await.map_err(failed)?;
    noted(&tx, deed, what.action(Side::In), filter, &letters).await.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(letters)
}

async fn act(
    connector: &Connector,
    what: DeadDeed,
    filter: &DeadFilter,
    limit: i64,
    deed: &Deed,
) -> Result<Vec<DeadLetter>, StoreError> {
    let failed = |error| store_error(FAILED, error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    tx.batch_execute(ONE_OPERATOR).await.map_err(failed)?;
    let mut letters = chosen(&tx, None, Side::Out, filter, limit).await?;
    let routes: Vec<&str> = letters.iter().map(|letter| letter.route.as_str()).collect();
    let seqs: Vec<i64> = letters.iter().map(|letter| letter.seq).collect();
    let lanes: Vec<i16> = letters.iter().map(|letter| letter.lane).collect();
    // What a relay records about the same keys comes wholly before this or wholly after it.
    tx.execute(include_str!("sql/lock_lanes_of_deed.sql"), &[&routes, &lanes]).await.map_err(failed)?;
    if what == DeadDeed::Retry {
        tx.execute(include_str!("sql/dead_retry.sql"), &[&routes, &seqs]).await.map_err(failed)?;
        let mut distinct: Vec<&str> = routes.clone();
        distinct.sort_unstable();
        distinct.dedup();
        for route in distinct {
            let of_route = letters.iter().filter(|letter| letter.route == route);
            let keys: Vec<&str> = of_route.filter_map(|letter| letter.key.as_deref()).collect();
            tx.execute(include_str!("../log/sql/promote.sql"), &[&route, &keys]).await.map_err(failed)?;
        }
    } else {
        let gone = tx.query(include_str!("sql/dead_discard.sql"), &[&routes, &seqs]).await.map_err(failed)?;
        let gone: HashSet<(String, i64)> = gone.iter().map(|row| (row.get(0), row.get(1))).collect();
        letters.retain(|letter| gone.contains(&(letter.route.clone(), letter.seq)));
    }
    if letters.is_empty() {
        return Ok(letters);
    }
    noted(&tx, deed, what.action(Side::Out), filter, &letters).await.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(letters)
}

async fn noted(
    tx: &Transaction<'_>,
    deed: &Deed,
    action: &str,
    filter: &DeadFilter,
    letters: &[DeadLetter],
) -> Result<(), tokio_postgres::Error> {
    let ids: Vec<&str> = letters.iter().map(|letter| letter.id.as_str()).collect();
    audit(tx, deed, action, &serde_json::to_string(filter).unwrap_or_default(), &ids).await
}

/// Writes what an operator does, in the transaction that does it.
pub(crate) async fn audit(
    tx: &Transaction<'_>,
    deed: &Deed,
    action: &str,
    conditions: &str,
    ids: &[&str],
) -> Result<(), tokio_postgres::Error> {
    let sql = "insert into postroom.audit (actor, action, reason, filter, message_ids)
               values ($1, $2, $3, $4::text::jsonb, $5::text[]::uuid[])";
    tx.execute(sql, &[&deed.actor, &action, &deed.reason, &conditions, &ids]).await.map(drop)
}

async fn chosen(
    tx: &Transaction<'_>,
    after: Option<&DeadCursor>,
    side: Side,
    filter: &DeadFilter,
    limit: i64,
) -> Result<Vec<DeadLetter>, StoreError> {
    let id = filter.id.map(uuid::Uuid::from);
    let newer = filter.newer_than.map(|age| age.as_secs_f64());
    let older = filter.older_than.map(|age| age.as_secs_f64());
    let rows = tx
        .query(
            match side {
                Side::Out => include_str!("sql/dead_chosen.sql"),
                Side::In => include_str!("sql/dead_in_chosen.sql"),
            },
            &[
                &filter.route,
                &id,
                &filter.topic,
                &filter.kind,
                &filter.tenant_id,
                &filter.aggregate_id,
                &filter.error,
                &newer,
                &older,
                &limit,
                &after.map(|after| after.route.as_str()),
                &after.map(|after| after.seq),
            ],
        )
        .await
        .map_err(|error| store_error("read the dead letters", error))?;
    rows.iter().map(letter).collect()
}

fn letter(row: &Row) -> Result<DeadLetter, StoreError> {
    let read = || -> Result<DeadLetter, BoxError> {
        Ok(DeadLetter {
            route: shown(row, 0)?,
            seq: row.try_get(1)?,
            id: row.try_get::<_, uuid::Uuid>(2)?.to_string(),
            topic: shown(row, 3)?,
            kind: shown(row, 4)?,
            key: shown_opt(row, 5)?,
            tenant_id: shown_opt(row, 6)?,
            aggregate_id: shown_opt(row, 7)?,
            attempts: row.try_get(8)?,
            cause: word(row, 9, Cause::of)?,
            error: shown(row, 10)?,
            died_seconds_ago: row.try_get(11)?,
            payload_bytes: row.try_get(12)?,
            headers: headers_from_json(shown_opt(row, 13)?.as_deref()),
            history: serde_json::from_str(&shown(row, 14)?).unwrap_or_default(),
            lane: row.try_get(15)?,
        })
    };
    read().map_err(|error| StoreError::Refused { what: "read a dead letter", source: error })
}
