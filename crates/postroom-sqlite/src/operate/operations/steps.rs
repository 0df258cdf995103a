//! The steps of operations. Each is one short transaction.

use std::collections::BTreeMap;

use postroom::{
    Candidate, Candidates, Deed, MessageId, OperationFilter, OperationKind, OperationState, Side, Stepped, StoreError,
};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};

use super::candidates::{Scope, candidates};
use super::{FILTER, stored};
use crate::connect::{NOW, store_error, word};
use crate::log::record::{COPIED, promote};
use crate::operate::dead::audit;
use crate::text::{Text, text};

/// Most messages that one step gives out: all other writers wait meanwhile.
const GIVEN_MAX: i64 = 200;
/// Nothing more is given out while so many have no outcome.
const PENDING_MAX: i64 = 2_000;
const OUTCOMES: i64 = 2_000;
const LOOKS: usize = 20;
const INBOX_KEPT: &str = "history, topic, type, payload, key, routing_key, content_type, headers, tenant_id, \
                          aggregate_type, aggregate_id, aggregate_version, occurred_ms";

/// An operation that goes on.
struct Due {
    id: String,
    kind: OperationKind,
    side: Side,
    route: String,
    filter: OperationFilter,
    upto: i64,
    cursor: i64,
    new_ids: bool,
    may: i64,
    deed: Deed,
}

/// One step of each operation that goes on.
pub(crate) fn step(connection: &mut Connection) -> Result<Stepped, StoreError> {
    let failed = |error| store_error("carry out operations", error);
    // Writers do not wait for one that has nothing to do.
    let any = "select exists (select 1 from postroom_operations where ended_ms is null)";
    if !connection.query_row(any, [], |row| row.get(0)).map_err(failed)? {
        return Ok(Stepped::default());
    }
    let mut stepped = Stepped::default();
    for mut due in due(connection).map_err(failed)? {
        for _ in 0..LOOKS {
            let scope = Scope { kind: due.kind, side: due.side, route: &due.route, filter: &due.filter };
            let found = candidates(connection, &scope, due.cursor, due.upto).map_err(failed)?;
            let found = found.at_most(usize::try_from(due.may).unwrap_or(0));
            let Some(given) = take(connection, &due, &found).map_err(failed)? else { break };
            stepped.given_out += given.unsigned_abs();
            if found.all_read {
                break;
            }
            due.cursor = found.to_seq;
            if !found.found.is_empty() {
                stepped.going_on += 1;
                break;
            }
        }
    }
    Ok(stepped)
}

/// Looks what became of messages that operations gave out, and moves the operations on.
fn due(connection: &mut Connection) -> Result<Vec<Due>, rusqlite::Error> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let read = |row: &Row<'_>| {
        let due = Due {
            id: text(row, 0)?,
            kind: word(row, 1, OperationKind::of)?,
            side: word(row, 2, Side::of)?,
            route: text(row, 3)?,
            filter: stored(row, 4, FILTER)?,
            upto: row.get(5)?,
            cursor: row.get(6)?,
            new_ids: row.get(7)?,
            may: GIVEN_MAX,
            deed: Deed { actor: text(row, 8)?, reason: text(row, 9)? },
        };
        let standing = Standing {
            state: word(row, 10, OperationState::of)?,
            canary: row.get(11)?,
            canary_done: row.get(12)?,
            goes_on: row.get(13)?,
            rate: row.get(14)?,
            released: row.get(15)?,
            read_all: row.get(16)?,
            since_ms: row.get(17)?,
        };
        Ok((due, standing))
    };
    let sql = format!(
        "select id, kind, side, route, filter, upto_seq, cursor_seq, new_ids, actor, reason, state, canary, canary_done, goes_on, rate,
                released, read_all, {NOW} - stepped_ms, created_ms
           from postroom_operations o
          where ended_ms is null
            and (state in ('running', 'cancelled') or exists (select 1 from postroom_operation_watch w where w.operation = o.id))
          order by state = 'running' desc, created_ms limit 200"
    );
    let open: Vec<(Due, Standing)> = tx.prepare(&sql)?.query_map([], read)?.collect::<Result<_, _>>()?;
    let mut going_on = Vec::new();
    for (mut due, standing) in open {
        tally(&tx, &due)?;
        if let Some(may) = moved_on(&tx, &due, &standing)? {
            due.may = may;
            going_on.push(due);
        }
    }
    tx.commit()?;
    Ok(going_on)
}

/// How an operation stands before a step.
struct Standing {
    state: OperationState,
    canary: Option<i64>,
    canary_done: bool,
    goes_on: bool,
    rate: Option<i64>,
    released: i64,
    read_all: bool,
    since_ms: i64,
}

/// Takes what has an outcome off the watched ones, and counts it.
fn tally(tx: &Transaction<'_>, due: &Due) -> Result<(), rusqlite::Error> {
    let waits = match due.side {
        Side::Out => "select 1 from postroom_parked p where p.route = ?2 and p.seq = w.seq",
        Side::In => "select 1 from postroom_inbox_messages m where m.consumer = ?2 and m.id = w.message_id",
    };
    // What is gone from where it waited was published, or handled, unless it died or its route was forgotten.
    let outcome = match due.side {
        Side::Out => {
            "coalesce(w.cause, case when exists (select 1 from postroom_routes r where r.name = ?2) then 'done' else 'removed' end)"
        }
        Side::In => {
            "coalesce(w.cause, case when exists (select 1 from postroom_inbox i where i.consumer = ?2 and i.message_id = w.message_id)
                                    then 'done' else 'removed' end)"
        }
    };
    let sql = format!(
        "select w.seq, w.message_id, {outcome} from postroom_operation_watch w
          where w.operation = ?1 and not exists ({waits}) limit {OUTCOMES}"
    );
    let ended: Vec<(i64, String, String)> = tx
        .prepare(&sql)?
        .query_map(params![due.id, due.route], |row| Ok((row.get(0)?, text(row, 1)?, text(row, 2)?)))?
        .collect::<Result<_, _>>()?;
    let mut counts: BTreeMap<String, i64> = BTreeMap::new();
    for (seq, id, outcome) in ended {
        let sql = "delete from postroom_operation_watch where operation = ?1 and seq = ?2 and message_id = ?3";
        tx.prepare_cached(sql)?.execute(params![due.id, seq, id])?;
        *counts.entry(outcome).or_default() += 1;
    }
    counts.iter().try_for_each(|(outcome, messages)| count(tx, &due.id, outcome, *messages))
}

fn count(tx: &Transaction<'_>, operation: &str, outcome: &str, messages: i64) -> Result<(), rusqlite::Error> {
    let sql = "insert into postroom_operation_tallies (operation, outcome, messages) values (?1, ?2, ?3)
                   on conflict (operation, outcome) do update set messages = messages + excluded.messages";
    tx.execute(sql, params![operation, outcome, messages]).map(drop)
}

/// Ends an operation, or its canary; how many messages it may give out now, if it goes on.
fn moved_on(tx: &Transaction<'_>, due: &Due, standing: &Standing) -> Result<Option<i64>, rusqlite::Error> {
    let pending: i64 =
        tx.query_row("select count(*) from postroom_operation_watch where operation = ?1", [&due.id], |row| {
            row.get(0)
        })?;
    let gone = due.side == Side::Out
        && !tx.query_row("select exists (select 1 from postroom_routes where name = ?1)", [&due.route], |row| {
            row.get(0)
        })?;
    if gone && standing.state != OperationState::Cancelled {
        let sql = "update postroom_operations set state = 'cancelled', note = 'the route is gone' where id = ?1";
        tx.execute(sql, [&due.id])?;
    }
    if gone || standing.state == OperationState::Cancelled || standing.read_all {
        if pending == 0 {
            let sql = format!(
                "update postroom_operations set state = case state when 'cancelled' then state else 'done' end, ended_ms = {NOW}
                  where id = ?1"
            );
            tx.execute(&sql, [&due.id])?;
        }
        return Ok(None);
    }
    if standing.state != OperationState::Running {
        return Ok(None);
    }
    let mut may = GIVEN_MAX;
    if let (Some(canary), false) = (standing.canary, standing.canary_done) {
        may = canary - standing.released;
        if may <= 0 {
            if pending == 0 {
                canary_ended(tx, due, standing)?;
            }
            return Ok(None);
        }
    } else if let Some(rate) = standing.rate {
        // The clock was ahead at the last step, and is not any more.
        if standing.since_ms < -2000 {
            let sql = format!("update postroom_operations set stepped_ms = {NOW} where id = ?1");
            tx.execute(&sql, [&due.id])?;
        }
        // A pause is not caught up with.
        may = rate.saturating_mul(standing.since_ms.clamp(0, 1000)) / 1000;
    }
    let may = may.min(GIVEN_MAX).min(PENDING_MAX - pending);
    Ok((may > 0).then_some(may))
}

fn canary_ended(tx: &Transaction<'_>, due: &Due, standing: &Standing) -> Result<(), rusqlite::Error> {
    let failed: i64 = tx.query_row(
        "select coalesce(sum(messages), 0) from postroom_operation_tallies where operation = ?1 and outcome <> 'done'",
        [&due.id],
        |row| row.get(0),
    )?;
    let given = standing.released;
    let (state, note) = match (failed, standing.goes_on) {
        (0, true) => ("running", None),
        (0, false) => ("waiting", Some(format!("all {given} canary messages went through"))),
        _ => ("waiting", Some(format!("{failed} of the {given} canary messages failed"))),
    };
    let sql = format!(
        "update postroom_operations set canary_done = 1, state = ?2, note = ?3, stepped_ms = {NOW} where id = ?1"
    );
    tx.execute(&sql, params![due.id, state, note]).map(drop)
}

/// Gives these out, or back, or deletes them. None: somebody else has moved the operation on, or stopped it.
fn take(connection: &mut Connection, due: &Due, found: &Candidates) -> Result<Option<i64>, rusqlite::Error> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let ours =
        "select 1 from postroom_operations where id = ?1 and state = 'running' and cursor_seq = ?2 and read_all = 0";
    if tx.query_row(ours, params![due.id, due.cursor], |_| Ok(())).optional()?.is_none() {
        return Ok(None);
    }
    let mut ids = Vec::new();
    for candidate in found.found.iter().filter(|candidate| candidate.ready) {
        let taken = match (due.kind, due.side) {
            (OperationKind::Replay, _) => replay(&tx, due, candidate)?,
            (OperationKind::Retry, Side::Out) => retry(&tx, due, candidate)?,
            (OperationKind::Retry, Side::In) => retry_in(&tx, due, candidate)?,
            (OperationKind::Discard, _) => discard(&tx, due, candidate)?,
        };
        let Some(id) = taken else { continue };
        if due.kind != OperationKind::Discard {
            let sql = "insert or ignore into postroom_operation_watch (operation, seq, message_id) values (?1, ?2, ?3)";
            tx.prepare_cached(sql)?.execute(params![due.id, candidate.headline.seq, id])?;
        }
        ids.push(id);
    }
    let given = i64::try_from(ids.len()).unwrap_or(i64::MAX);
    if given > 0 {
        let action = match (due.kind, due.side) {
            (OperationKind::Replay, _) => "replay".to_owned(),
            (kind, Side::Out) => format!("dead.{kind}"),
            (kind, Side::In) => format!("inbox.{kind}"),
        };
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        audit(&tx, &due.deed, &action, &serde_json::json!({ "operation": due.id }).to_string(), &ids)?;
        if due.kind == OperationKind::Discard {
            count(&tx, &due.id, "done", given)?;
        }
    }
    let left = i64::try_from(found.found.len()).unwrap_or(i64::MAX) - given;
    // What was given out is paid with its share of a second; at most one second is saved up.
    let sql = format!(
        "update postroom_operations set released = released + ?2, skipped = skipped + ?3, cursor_seq = ?4, read_all = ?5,
                stepped_ms = case when ?2 = 0 then stepped_ms when rate is null then {NOW}
                                  else min({NOW} + 1000, max(stepped_ms, {NOW} - 1000) + ?2 * 1000 / rate) end
          where id = ?1"
    );
    tx.execute(&sql, params![due.id, given, left, found.to_seq, found.all_read])?;
    tx.commit()?;
    Ok(Some(given))
}

/// A key that is not UTF-8 can be given to no statement: its messages go without their order.
fn whole_key(tx: &Transaction<'_>, sql: &str, route: &str, seq: i64) -> Result<Option<String>, rusqlite::Error> {
    let key: Option<Option<Text>> = tx.query_row(sql, params![route, seq], |row| row.get(0)).optional()?;
    Ok(key.flatten().filter(|key| key.whole).map(|key| key.text))
}

fn replay(tx: &Transaction<'_>, due: &Due, candidate: &Candidate) -> Result<Option<String>, rusqlite::Error> {
    let seq = candidate.headline.seq;
    let sql = "select coalesce(key, aggregate_id) from postroom_outbox where ?1 is not null and seq = ?2";
    let key = whole_key(tx, sql, &due.route, seq)?;
    let id = if due.new_ids { MessageId::new().to_string() } else { candidate.headline.id.clone() };
    let rest = COPIED.strip_prefix("id, ").unwrap_or(COPIED);
    // Text, so that nothing of what was written changes.
    let headers = "case when not ?5 then headers
                        when headers is null or replace(replace(trim(headers), ' ', ''), char(10), '') = '{}'
                        then json_object('postroom-replay-of', id)
                        else '{\"postroom-replay-of\":\"' || id || '\",' || substr(ltrim(headers, ' ' || char(9, 10, 13)), 2) end";
    let copied = rest.replace("headers", headers);
    // Looked at again: it was ready before this transaction began.
    let sql = format!(
        "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_ms, waits_since_ms, id, {rest})
         select ?1, seq, 0, ?3, case when ?3 is null then 'retry' else 'queued' end, 0, {NOW}, {NOW}, ?4, {copied}
           from postroom_outbox o
          where o.seq = ?2 and o.seq <= coalesce((select l.position_seq from postroom_lanes l where l.route = ?1), 0)
            and not exists (select 1 from postroom_dead_letters d where d.route = ?1 and d.seq = o.seq)
             on conflict (route, seq) do nothing"
    );
    if tx.execute(&sql, params![due.route, seq, key, id, due.new_ids])? == 0 {
        return Ok(None);
    }
    if let Some(key) = key {
        promote(tx, &due.route, &key)?;
    }
    Ok(Some(id))
}

fn retry(tx: &Transaction<'_>, due: &Due, candidate: &Candidate) -> Result<Option<String>, rusqlite::Error> {
    let seq = candidate.headline.seq;
    let sql = "select coalesce(key, aggregate_id) from postroom_dead_letters where route = ?1 and seq = ?2";
    let key = whole_key(tx, sql, &due.route, seq)?;
    let sql = format!(
        "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_ms, waits_since_ms, last_error, history, {COPIED})
         select route, seq, 0, coalesce(key, aggregate_id),
                case when ?3 is null then 'retry' else 'queued' end, 0, {NOW}, {NOW}, error, history, {COPIED}
           from postroom_dead_letters where route = ?1 and seq = ?2
             on conflict (route, seq) do nothing"
    );
    if tx.execute(&sql, params![due.route, seq, key])? == 0 {
        return Ok(None);
    }
    tx.execute("delete from postroom_dead_letters where route = ?1 and seq = ?2", params![due.route, seq])?;
    tx.execute("delete from postroom_blocked_keys where route = ?1 and seq = ?2", params![due.route, seq])?;
    if let Some(key) = key {
        promote(tx, &due.route, &key)?;
    }
    Ok(Some(candidate.headline.id.clone()))
}

fn retry_in(tx: &Transaction<'_>, due: &Due, candidate: &Candidate) -> Result<Option<String>, rusqlite::Error> {
    let id = &candidate.headline.id;
    let sql = format!(
        "insert into postroom_inbox_messages (consumer, id, state, due_ms, waits_since_ms, received_ms, ordering_key, last_error, {INBOX_KEPT})
         select consumer, id, 'ready', {NOW}, {NOW}, {NOW}, ordering_key, error, {INBOX_KEPT}
           from postroom_dead_consume where consumer = ?1 and id = ?2
             on conflict (consumer, id) do nothing"
    );
    if tx.execute(&sql, params![due.route, id])? == 0 {
        return Ok(None);
    }
    tx.execute("delete from postroom_dead_consume where consumer = ?1 and id = ?2", params![due.route, id])?;
    Ok(Some(id.clone()))
}

/// One that the position has not passed would be read and sent again after a crash.
fn discard(tx: &Transaction<'_>, due: &Due, candidate: &Candidate) -> Result<Option<String>, rusqlite::Error> {
    let (seq, id) = (candidate.headline.seq, &candidate.headline.id);
    let gone = match due.side {
        Side::Out => tx.execute(
            "delete from postroom_dead_letters where route = ?1 and seq = ?2
                and coalesce((select position_seq >= ?2 from postroom_lanes where route = ?1 and lane = 0), 1)",
            params![due.route, seq],
        )?,
        Side::In => {
            tx.execute("delete from postroom_dead_consume where consumer = ?1 and id = ?2", params![due.route, id])?
        }
    };
    if gone == 0 {
        return Ok(None);
    }
    if due.side == Side::Out {
        tx.execute("delete from postroom_blocked_keys where route = ?1 and seq = ?2", params![due.route, seq])?;
    }
    Ok(Some(id.clone()))
}
