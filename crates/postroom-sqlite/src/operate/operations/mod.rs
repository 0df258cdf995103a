//! Operations on many messages: how they begin and stand, and the groups of dead letters that they may be about.

mod candidates;
mod steps;

use std::collections::BTreeMap;

use postroom::{
    Cause, DeadCursor, DeadNote, Deed, Headline, NewOperation, OperationEffects, OperationFilter, OperationId,
    OperationKind, OperationState, ReplayPlace, ShownOperation, Side, Steer, StoreError,
};
use rusqlite::{Connection, Row, TransactionBehavior, params};

use crate::connect::{NOW, store_error, word};
use crate::operate::dead::audit;
use crate::text::{text, text_or_null};

pub(crate) use candidates::survey;
use candidates::upto;
pub(crate) use steps::step;

/// What dead letters died of, from behind this place on.
pub(crate) fn headlines(
    connection: &Connection,
    side: Side,
    after: Option<&DeadCursor>,
    limit: i64,
) -> Result<Vec<Headline>, StoreError> {
    let (table, route) = match side {
        Side::Out => ("postroom_dead_letters", "route"),
        Side::In => ("postroom_dead_consume", "consumer"),
    };
    let sql = format!(
        "select {route}, seq, id, type, cause, substr(error, 1, 1000), ({NOW} - died_ms) / 1000.0 from {table}
          where ({route}, seq) > (?1, ?2) order by {route}, seq limit ?3"
    );
    let (of, seq) = after.map(|after| (after.route.as_str(), after.seq)).unwrap_or_default();
    let read = |row: &Row<'_>| {
        Ok(Headline {
            route: text(row, 0)?,
            seq: row.get(1)?,
            id: text(row, 2)?,
            kind: text(row, 3)?,
            cause: word(row, 4, Cause::of)?,
            error: text(row, 5)?,
            died_seconds_ago: row.get(6)?,
        })
    };
    connection
        .prepare(&sql)
        .and_then(|mut statement| statement.query_map(params![of, seq, limit], read)?.collect())
        .map_err(|error| store_error("read the dead letters", error))
}

/// What was written about these groups, newest first.
pub(crate) fn dead_notes(connection: &Connection, groups: &[String]) -> Result<Vec<(String, DeadNote)>, StoreError> {
    let sql = format!(
        "select dead_group, ({NOW} - at_ms) / 1000.0, actor, note from postroom_dead_notes
          where dead_group in (select value from json_each(?1)) order by at_ms desc limit 1000"
    );
    let read = |row: &Row<'_>| {
        Ok((text(row, 0)?, DeadNote { seconds_ago: row.get(1)?, actor: text(row, 2)?, note: text(row, 3)? }))
    };
    connection
        .prepare(&sql)
        .and_then(|mut statement| statement.query_map([serde_json::json!(groups).to_string()], read)?.collect())
        .map_err(|error| store_error("read the notes about dead letters", error))
}

/// Writes something about a group.
pub(crate) fn note_dead(connection: &mut Connection, group: &str, note: &str, deed: &Deed) -> Result<(), StoreError> {
    let mut write = || -> Result<(), rusqlite::Error> {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let sql =
            format!("insert into postroom_dead_notes (dead_group, at_ms, actor, note) values (?1, {NOW}, ?2, ?3)");
        tx.execute(&sql, params![group, deed.actor, note])?;
        let about = serde_json::json!({ "group": group, "note": note }).to_string();
        audit(&tx, deed, "dead.note", &about, &[])?;
        tx.commit()
    };
    write().map_err(|error| store_error("write a note about dead letters; nothing was written", error))
}

/// Begins an operation: from now on a relay process carries it out.
pub(crate) fn begin(
    connection: &mut Connection,
    id: OperationId,
    operation: &NewOperation,
    deed: &Deed,
) -> Result<(), StoreError> {
    const WHAT: &str = "begin the operation; nothing was changed";
    let NewOperation { kind, side, route, filter, planned, canary, goes_on, rate, place, new_ids } = operation;
    if *place == ReplayPlace::Behind {
        let source = "SQLite has no place behind what waits: leave out --behind".into();
        return Err(StoreError::Refused { what: WHAT, source });
    }
    let mut write = || -> Result<(), rusqlite::Error> {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let upto = upto(&tx, operation)?;
        let sql = format!(
            "insert into postroom_operations (id, kind, side, route, filter, upto_seq, canary, goes_on, rate, place, new_ids, actor, reason,
                                              planned, created_ms, stepped_ms)
             values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, {NOW}, {NOW})"
        );
        tx.execute(
            &sql,
            params![
                id.to_string(),
                kind.as_str(),
                side.as_str(),
                route,
                serde_json::json!(filter).to_string(),
                upto,
                canary,
                goes_on,
                rate,
                place.as_str(),
                new_ids,
                deed.actor,
                deed.reason,
                planned.map(|planned| i64::try_from(planned).unwrap_or(i64::MAX))
            ],
        )?;
        let about =
            serde_json::json!({ "operation": id, "kind": kind, "side": side, "route": route, "filter": filter });
        audit(&tx, deed, "operation.begin", &about.to_string(), &[])?;
        tx.commit()
    };
    write().map_err(|error| store_error(WHAT, error))
}

/// Operations, newest first, or the one with this id.
pub(crate) fn operations(
    connection: &Connection,
    id: Option<OperationId>,
    limit: i64,
) -> Result<Vec<ShownOperation>, StoreError> {
    let sql = format!(
        "select o.id, o.kind, o.side, o.route, o.filter, o.state, o.note, o.canary, o.goes_on, o.rate, o.place, o.new_ids, o.skipped,
                o.released, (select json_group_object(t.outcome, t.messages) from postroom_operation_tallies t where t.operation = o.id),
                (select count(*) from postroom_operation_watch w where w.operation = o.id), o.read_all,
                ({NOW} - o.created_ms) / 1000.0, (coalesce(o.ended_ms, {NOW}) - o.created_ms) / 1000.0, o.actor, o.reason, o.planned
           from postroom_operations o where ?1 is null or o.id = ?1 order by o.created_ms desc, o.id limit ?2"
    );
    connection
        .prepare(&sql)
        .and_then(|mut statement| {
            statement.query_map(params![id.map(|id| id.to_string()), limit], operation)?.collect()
        })
        .map_err(|error| store_error("read the operations", error))
}

/// JSON that was written by us.
fn stored<T>(row: &Row<'_>, column: usize, read: ReadJson<T>) -> Result<T, rusqlite::Error> {
    read(&text(row, column)?).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(error))
    })
}

type ReadJson<T> = fn(&str) -> Result<T, serde_json::Error>;
const FILTER: ReadJson<OperationFilter> = |json| serde_json::from_str(json);
const OUTCOME_COUNTS: ReadJson<BTreeMap<String, i64>> = |json| serde_json::from_str(json);

fn operation(row: &Row<'_>) -> Result<ShownOperation, rusqlite::Error> {
    let mut outcomes = stored(row, 14, OUTCOME_COUNTS)?;
    let (done, removed) = (outcomes.remove("done").unwrap_or_default(), outcomes.remove("removed").unwrap_or_default());
    Ok(ShownOperation {
        id: word(row, 0, |id| id.parse().ok())?,
        kind: word(row, 1, OperationKind::of)?,
        side: word(row, 2, Side::of)?,
        route: text(row, 3)?,
        filter: stored(row, 4, FILTER)?,
        state: word(row, 5, OperationState::of)?,
        note: text_or_null(row, 6)?,
        canary: row.get(7)?,
        goes_on: row.get(8)?,
        rate: row.get(9)?,
        place: word(row, 10, ReplayPlace::of)?,
        new_ids: row.get(11)?,
        planned: row.get(21)?,
        matched: 0,
        gone: 0,
        left_alone: row.get(12)?,
        given_out: row.get(13)?,
        done,
        failed: outcomes,
        removed,
        pending: row.get(15)?,
        read_all: row.get(16)?,
        coverage: None,
        began_seconds_ago: row.get(17)?,
        lasted_seconds: row.get(18)?,
        per_second: 0.0,
        actor: text(row, 19)?,
        reason: text(row, 20)?,
    }
    .finished())
}

/// What became of its messages at each consumer of this database.
pub(crate) fn effects(connection: &Connection, id: OperationId) -> Result<Vec<OperationEffects>, StoreError> {
    let sql = "with given as materialized (
                   select distinct g.value as id, o.created_ms, o.side = 'in' as handled_now
                     from postroom_operations o
                     join postroom_audit a on a.at_ms >= o.created_ms and a.filter ->> 'operation' = o.id
                      and a.action in ('replay', 'dead.retry', 'inbox.retry')
                     join json_each(a.message_ids) g where o.id = ?1),
               found as materialized (
                   select c.consumer,
                          case when exists (select 1 from postroom_inbox_messages m where m.consumer = c.consumer and m.id = g.id) then 'waiting'
                               when exists (select 1 from postroom_dead_consume d where d.consumer = c.consumer and d.id = g.id) then 'dead'
                               when i.message_id is null then 'missing'
                               -- A dead letter of a consumer was in the inbox before: without an effect.
                               when g.handled_now or i.processed_ms >= g.created_ms then 'effect'
                               else 'suppressed' end as state
                     from (select consumer from postroom_inbox union select consumer from postroom_inbox_messages) c
                    cross join given g
                     left join postroom_inbox i on i.consumer = c.consumer and i.message_id = g.id)
               select consumer, sum(state = 'effect'), sum(state = 'suppressed'), sum(state = 'waiting'), sum(state = 'dead'),
                      sum(state = 'missing')
                 from found group by consumer order by consumer";
    let read = |row: &Row<'_>| {
        Ok(OperationEffects {
            consumer: text(row, 0)?,
            effects: row.get(1)?,
            suppressed: row.get(2)?,
            waiting: row.get(3)?,
            dead: row.get(4)?,
            missing: row.get(5)?,
        })
    };
    connection
        .prepare(sql)
        .and_then(|mut statement| statement.query_map([id.to_string()], read)?.collect())
        .map_err(|error| store_error("look what became of the messages of an operation", error))
}

/// Pauses, resumes or cancels; false: it is in no state for that.
pub(crate) fn steer(
    connection: &mut Connection,
    id: OperationId,
    what: Steer,
    deed: &Deed,
) -> Result<bool, StoreError> {
    let mut write = || -> Result<bool, rusqlite::Error> {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let (from, to) = match what {
            Steer::Pause => ("'running', 'waiting'", "paused"),
            Steer::Resume => ("'waiting', 'paused'", "running"),
            Steer::Cancel => ("'running', 'waiting', 'paused'", "cancelled"),
        };
        let sql = format!(
            "update postroom_operations set state = ?2, note = null, stepped_ms = {NOW} where id = ?1 and state in ({from})"
        );
        if tx.execute(&sql, params![id.to_string(), to])? == 0 {
            return Ok(false);
        }
        let about = serde_json::json!({ "operation": id }).to_string();
        audit(&tx, deed, &format!("operation.{what}"), &about, &[])?;
        tx.commit()?;
        Ok(true)
    };
    write().map_err(|error| store_error("change the operation; nothing was changed", error))
}
