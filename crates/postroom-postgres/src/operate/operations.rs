//! Operations on many messages: what they would do, how they stand, and their steps. What a step may do only the functions in the
//! database decide.

use std::collections::BTreeMap;

use postroom::{
    Candidate, Candidates, Cause, DeadCursor, Deed, Headline, NewOperation, OperationEffects, OperationFilter,
    OperationId, OperationKind, OperationState, ReplayPlace, ShownOperation, Side, Steer, Stepped, StoreError, Survey,
};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::dead::audit;
use crate::operate::session::OperatorSession;
use crate::text::{shown, shown_opt, word};

/// Rows of the outbox that one look is about at most and at least (it may read twice as many), and dead letters.
const ROWS: i64 = 4_000;
const ROWS_MIN: i64 = 50;
const DEAD_ROWS: i64 = 5_000;
/// Most messages whose outcome one step looks for.
const OUTCOMES: i32 = 5_000;
/// So many looks in one step, for operations whose messages are far apart.
const LOOKS: usize = 20;
const READ: &str = "read the operations";

/// One look at what an operation would be about.
pub(crate) async fn survey(
    connector: &Connector,
    operation: &NewOperation,
    survey: &mut Survey,
) -> Result<(), StoreError> {
    let failed = |error| store_error("look what would be done", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    tx.batch_execute("set local enable_seqscan = off").await.map_err(failed)?;
    let upto = upto(&tx, operation).await.map_err(failed)?;
    let scope =
        Scope { kind: operation.kind, side: operation.side, route: &operation.route, filter: &operation.filter };
    let found = candidates(&tx, &scope, survey.to_seq, upto, (ROWS, i64::MAX)).await?;
    let (ids, keys) = survey.add(&found);
    let ids: Vec<Uuid> = ids.into_iter().map(Uuid::from).collect();
    if !ids.is_empty() && operation.kind == OperationKind::Replay {
        for row in tx.query(include_str!("sql/consumers.sql"), &[&ids]).await.map_err(failed)? {
            let remembered: i64 = row.try_get(1).map_err(failed)?;
            if remembered > 0 {
                *survey.remembered_by.entry(shown(&row, 0).map_err(failed)?).or_default() += remembered.unsigned_abs();
            }
        }
    }
    if operation.side == Side::Out && !keys.is_empty() && survey.blocked_keys.len() < 20 {
        let sql = "select distinct b.ordering_key from postroom.blocked_keys b
                    where b.route = $1 and b.ordering_key = any ($2) order by 1 limit 20";
        for row in tx.query(sql, &[&operation.route, &keys]).await.map_err(failed)? {
            let key = shown(&row, 0).map_err(failed)?;
            if survey.blocked_keys.len() < 20 && !survey.blocked_keys.contains(&key) {
                survey.blocked_keys.push(key);
            }
        }
    }
    Ok(())
}

/// The last seq that an operation may be about: what is written, or dies, later is not meant.
async fn upto(tx: &Transaction<'_>, operation: &NewOperation) -> Result<i64, tokio_postgres::Error> {
    let sql = match (operation.kind, operation.side) {
        (OperationKind::Replay, _) => {
            return tx.query_one("select last_value from postroom.outbox_seq_seq", &[]).await?.try_get(0);
        }
        (_, Side::Out) => "select coalesce(max(d.seq), 0) from postroom.dead_letters d where d.route = $1",
        (_, Side::In) => "select coalesce(max(d.seq), 0) from postroom.dead_consume d where d.consumer = $1",
    };
    tx.query_one(sql, &[&operation.route]).await?.try_get(0)
}

struct Scope<'a> {
    kind: OperationKind,
    side: Side,
    route: &'a str,
    filter: &'a OperationFilter,
}

async fn candidates(
    tx: &Transaction<'_>,
    scope: &Scope<'_>,
    from: i64,
    upto: i64,
    (rows, most): (i64, i64),
) -> Result<Candidates, StoreError> {
    let failed = |error| store_error("look for messages", error);
    let Scope { kind, side, route, filter } = scope;
    let ids: Option<Vec<Uuid>> =
        (!filter.ids.is_empty()).then(|| filter.ids.iter().map(|id| Uuid::from(*id)).collect());
    let rows_max = if *kind == OperationKind::Replay { rows } else { DEAD_ROWS };
    let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![
        route,
        &from,
        &upto,
        &rows_max,
        &ids,
        &filter.since_ms,
        &filter.until_ms,
        &filter.topic,
        &filter.kind,
        &filter.key,
        &filter.tenant_id,
        &filter.aggregate_id,
    ];
    let sql = match (kind, side) {
        (OperationKind::Replay, _) => include_str!("sql/candidates_replay.sql"),
        (_, Side::Out) => include_str!("sql/candidates_dead.sql"),
        (_, Side::In) => include_str!("sql/candidates_dead_in.sql"),
    };
    parameters.push(if *kind == OperationKind::Replay { &most } else { &filter.error });
    let rows = tx.query(sql, &parameters).await.map_err(failed)?;
    let mut found = Vec::with_capacity(rows.len());
    let mut to_seq = upto;
    for row in &rows {
        to_seq = row.try_get(0).map_err(failed)?;
        if let Some(candidate) = candidate(row, route).map_err(failed)? {
            found.push(candidate);
        }
    }
    let all_read = to_seq >= upto;
    Ok(Candidates { found, to_seq, all_read }.of_group(*side, filter))
}

fn candidate(row: &Row, route: &str) -> Result<Option<Candidate>, tokio_postgres::Error> {
    let Some(seq) = row.try_get::<_, Option<i64>>(1)? else { return Ok(None) };
    let headline = Headline {
        route: route.to_owned(),
        seq,
        id: row.try_get::<_, Uuid>(2)?.to_string(),
        kind: shown(row, 3)?,
        cause: Cause::of(row.try_get(7)?).unwrap_or(Cause::Permanent),
        error: shown(row, 8)?,
        died_seconds_ago: row.try_get(9)?,
    };
    Ok(Some(Candidate {
        headline,
        topic: shown(row, 4)?,
        key: shown_opt(row, 5)?,
        at_ms: row.try_get(6)?,
        ready: row.try_get(10)?,
    }))
}

/// What dead letters died of, from behind this place on.
pub(crate) async fn headlines(
    connector: &Connector,
    side: Side,
    after: Option<&DeadCursor>,
    limit: i64,
) -> Result<Vec<Headline>, StoreError> {
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let failed = |error| store_error("read the dead letters", error);
    let sql = match side {
        Side::Out => {
            "select d.route, d.seq, d.id, d.type, d.cause, left(d.error, 1000), extract(epoch from clock_timestamp() - d.died_at)::float8
               from postroom.dead_letters d where (d.route, d.seq) > ($1, $2) order by d.route, d.seq limit $3"
        }
        Side::In => {
            "select d.consumer, d.seq, d.message_id, d.type, d.cause, left(d.error, 1000),
                    extract(epoch from clock_timestamp() - d.died_at)::float8
               from postroom.dead_consume d where (d.consumer, d.seq) > ($1, $2) order by d.consumer, d.seq limit $3"
        }
    };
    let (route, seq) = after.map(|after| (after.route.as_str(), after.seq)).unwrap_or_default();
    let rows = tx.query(sql, &[&route, &seq, &limit]).await.map_err(failed)?;
    let headline = |row: &Row| -> Result<Headline, tokio_postgres::Error> {
        Ok(Headline {
            route: shown(row, 0)?,
            seq: row.try_get(1)?,
            id: row.try_get::<_, Uuid>(2)?.to_string(),
            kind: shown(row, 3)?,
            cause: Cause::of(row.try_get(4)?).unwrap_or(Cause::Permanent),
            error: shown(row, 5)?,
            died_seconds_ago: row.try_get(6)?,
        })
    };
    rows.iter().map(headline).collect::<Result<_, _>>().map_err(failed)
}

/// What was written about these groups, newest first.
pub(crate) async fn dead_notes(
    connector: &Connector,
    groups: &[String],
) -> Result<Vec<(String, postroom::DeadNote)>, StoreError> {
    let failed = |error| store_error("read the notes about dead letters", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let sql = "select n.dead_group, extract(epoch from clock_timestamp() - n.at)::float8, n.actor, n.note
                 from postroom.dead_notes n where n.dead_group = any ($1) order by n.at desc limit 1000";
    let rows = tx.query(sql, &[&groups]).await.map_err(failed)?;
    let note = |row: &Row| -> Result<(String, postroom::DeadNote), tokio_postgres::Error> {
        Ok((
            shown(row, 0)?,
            postroom::DeadNote { seconds_ago: row.try_get(1)?, actor: shown(row, 2)?, note: shown(row, 3)? },
        ))
    };
    rows.iter().map(note).collect::<Result<_, _>>().map_err(failed)
}

/// Writes something about a group.
pub(crate) async fn note_dead(connector: &Connector, group: &str, note: &str, deed: &Deed) -> Result<(), StoreError> {
    let failed = |error| store_error("write a note about dead letters; nothing was written", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    let sql = "insert into postroom.dead_notes (dead_group, actor, note) values ($1, $2, $3)";
    tx.execute(sql, &[&group, &deed.actor, &note]).await.map_err(failed)?;
    let about = serde_json::json!({ "group": group, "note": note }).to_string();
    audit(&tx, deed, "dead.note", &about, &[]).await.map_err(failed)?;
    tx.commit().await.map_err(failed)
}

/// Begins an operation: from now on relay processes carry it out.
pub(crate) async fn begin(
    connector: &Connector,
    id: OperationId,
    operation: &NewOperation,
    deed: &Deed,
) -> Result<(), StoreError> {
    let failed = |error| store_error("begin the operation; nothing was changed", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    let upto = upto(&tx, operation).await.map_err(failed)?;
    let NewOperation { kind, side, route, filter, planned, canary, goes_on, rate, place, new_ids } = operation;
    let number = |number: &Option<u32>| number.map(|number| i32::try_from(number).unwrap_or(i32::MAX));
    let filter_json = serde_json::to_string(filter).unwrap_or_default();
    let sql = "insert into postroom.operations (id, kind, side, route, filter, upto_seq, canary, goes_on, rate, place, new_ids, actor, reason, planned)
               values ($1, $2, $3, $4, $5::text::jsonb, $6, $7, $8, $9, $10, $11, $12, $13, $14)";
    tx.execute(
        sql,
        &[
            id.as_uuid(),
            &kind.as_str(),
            &side.as_str(),
            route,
            &filter_json,
            &upto,
            &number(canary),
            goes_on,
            &number(rate),
            &place.as_str(),
            new_ids,
            &deed.actor,
            &deed.reason,
            &planned.map(|planned| i64::try_from(planned).unwrap_or(i64::MAX)),
        ],
    )
    .await
    .map_err(failed)?;
    let about = serde_json::json!({ "operation": id, "kind": kind, "side": side, "route": route, "filter": filter });
    audit(&tx, deed, "operation.begin", &about.to_string(), &[]).await.map_err(failed)?;
    tx.commit().await.map_err(failed)
}

/// Operations, newest first, or the one with this id.
pub(crate) async fn operations(
    connector: &Connector,
    id: Option<OperationId>,
    limit: i64,
) -> Result<Vec<ShownOperation>, StoreError> {
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let id = id.map(|id| *id.as_uuid());
    let rows =
        tx.query(include_str!("sql/operations.sql"), &[&id, &limit]).await.map_err(|error| store_error(READ, error))?;
    rows.iter().map(operation).collect()
}

fn operation(row: &Row) -> Result<ShownOperation, StoreError> {
    let read = || -> Result<ShownOperation, postroom::BoxError> {
        let mut outcomes: BTreeMap<String, i64> = serde_json::from_str(row.try_get(14)?)?;
        let (done, removed) =
            (outcomes.remove("done").unwrap_or_default(), outcomes.remove("removed").unwrap_or_default());
        Ok(ShownOperation {
            id: OperationId::from(row.try_get::<_, Uuid>(0)?),
            kind: word(row, 1, OperationKind::of)?,
            side: word(row, 2, Side::of)?,
            route: shown(row, 3)?,
            filter: serde_json::from_str(row.try_get(4)?)?,
            state: word(row, 5, OperationState::of)?,
            note: shown_opt(row, 6)?,
            canary: row.try_get(7)?,
            goes_on: row.try_get(8)?,
            rate: row.try_get(9)?,
            place: word(row, 10, ReplayPlace::of)?,
            new_ids: row.try_get(11)?,
            planned: row.try_get(21)?,
            matched: 0,
            gone: 0,
            left_alone: row.try_get(12)?,
            given_out: row.try_get(13)?,
            done,
            failed: outcomes,
            removed,
            pending: row.try_get(15)?,
            read_all: row.try_get(16)?,
            coverage: None,
            began_seconds_ago: row.try_get(17)?,
            lasted_seconds: row.try_get(18)?,
            per_second: 0.0,
            actor: shown(row, 19)?,
            reason: shown(row, 20)?,
        }
        .finished())
    };
    read().map_err(|source| StoreError::Refused { what: READ, source })
}

/// What became of its messages at each consumer of this database.
pub(crate) async fn effects(connector: &Connector, id: OperationId) -> Result<Vec<OperationEffects>, StoreError> {
    let failed = |error| store_error("look what became of the messages of an operation", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let rows = tx.query(include_str!("sql/operation_effects.sql"), &[id.as_uuid()]).await.map_err(failed)?;
    let effect = |row: &Row| -> Result<OperationEffects, tokio_postgres::Error> {
        Ok(OperationEffects {
            consumer: shown(row, 0)?,
            effects: row.try_get(1)?,
            suppressed: row.try_get(2)?,
            waiting: row.try_get(3)?,
            dead: row.try_get(4)?,
            missing: row.try_get(5)?,
        })
    };
    rows.iter().map(effect).collect::<Result<_, _>>().map_err(failed)
}

/// Pauses, resumes or cancels; false: it is in no state for that.
pub(crate) async fn steer(
    connector: &Connector,
    id: OperationId,
    what: Steer,
    deed: &Deed,
) -> Result<bool, StoreError> {
    let failed = |error| store_error("change the operation; nothing was changed", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    let (from, to): (&[&str], &str) = match what {
        Steer::Pause => (&["running", "waiting"], "paused"),
        Steer::Resume => (&["waiting", "paused"], "running"),
        Steer::Cancel => (&["running", "waiting", "paused"], "cancelled"),
    };
    let sql = "update postroom.operations set state = $2, note = null, stepped_at = clock_timestamp()
                where id = $1 and state = any ($3)";
    if tx.execute(sql, &[id.as_uuid(), &to, &from]).await.map_err(failed)? == 0 {
        return Ok(false);
    }
    let about = serde_json::json!({ "operation": id }).to_string();
    audit(&tx, deed, &format!("operation.{what}"), &about, &[]).await.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(true)
}

/// One step of each operation that goes on.
///
/// `kept` is the connection of the step before, and keeps this one's while there is more to do: ten new ones a second would cost more than the steps.
pub(crate) async fn step(connector: &Connector, kept: &mut Option<OperatorSession>) -> Result<Stepped, StoreError> {
    let mut session = match kept.take() {
        Some(session) => session,
        None => OperatorSession::open(connector).await?,
    };
    let stepped = step_in(&mut session).await?;
    if stepped.given_out > 0 || stepped.going_on > 0 {
        *kept = Some(session);
    }
    Ok(stepped)
}

async fn step_in(session: &mut OperatorSession) -> Result<Stepped, StoreError> {
    const FAILED: &str = "carry out operations";
    let failed = |error| store_error(FAILED, error);
    let tx = session.deed().await?;
    // What became of messages can be read again after a crash, so nobody waits for the disk.
    tx.batch_execute("set local synchronous_commit = off").await.map_err(failed)?;
    let sql = "select d.id, d.kind, d.side, d.route, d.filter::text, d.upto_seq, d.cursor_seq, d.may from postroom.operations_due($1) d";
    let due = tx.query(sql, &[&OUTCOMES]).await.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    let mut stepped = Stepped::default();
    for row in &due {
        let read = || -> Result<_, postroom::BoxError> {
            let filter: OperationFilter = serde_json::from_str(row.try_get(4)?)?;
            let (kind, side) = (word(row, 1, OperationKind::of)?, word(row, 2, Side::of)?);
            let route: String = row.try_get(3)?;
            let numbers: (i64, i64, i64) = (row.try_get(5)?, row.try_get(6)?, row.try_get(7)?);
            Ok((row.try_get::<_, Uuid>(0)?, kind, side, route, filter, numbers))
        };
        let (id, kind, side, route, filter, (upto, mut from, mut may)) =
            read().map_err(|source| StoreError::Refused { what: FAILED, source })?;
        let scope = Scope { kind, side, route: &route, filter: &filter };
        // No more rows than it takes if all match; more from look to look if they do not.
        let (mut rows, mut found_some) = (may.clamp(ROWS_MIN, ROWS), false);
        for _ in 0..LOOKS {
            let tx = session.deed().await?;
            tx.batch_execute("set local enable_seqscan = off").await.map_err(failed)?;
            // One more than may go tells that there are more.
            let found =
                candidates(&tx, &scope, from, upto, (rows, may + 1)).await?.at_most(usize::try_from(may).unwrap_or(0));
            let seqs: Vec<i64> = found.found.iter().map(|candidate| candidate.headline.seq).collect();
            let sql = "select postroom.operation_step($1, $2, $3, $4, $5)";
            let row = tx.query_one(sql, &[&id, &seqs, &from, &found.to_seq, &found.all_read]).await.map_err(failed)?;
            let given: Option<i64> = row.try_get(0).map_err(failed)?;
            tx.commit().await.map_err(failed)?;
            // Another process was faster, or somebody stopped it.
            let Some(given) = given else { break };
            stepped.given_out += given.unsigned_abs();
            if found.all_read {
                break;
            }
            from = found.to_seq;
            found_some |= !seqs.is_empty();
            may -= i64::try_from(seqs.len()).unwrap_or(may);
            if may <= 0 {
                break;
            }
            rows = rows.saturating_mul(4).min(ROWS);
        }
        stepped.going_on += usize::from(found_some);
    }
    Ok(stepped)
}
