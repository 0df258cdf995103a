//! The steps of operations. Each is one short transaction.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Row, Transaction, params};
use postroom::{
    Candidate, Candidates, Deed, MessageId, OperationFilter, OperationKind, OperationState, Side, Stepped, StoreError,
};

use super::candidates::{Scope, candidates};
use super::word;
use crate::desk::{Desk, Failed, begin};
use crate::log::record::promote;
use crate::log::{COPIED, get, json};
use crate::operate::audit::audit;
use crate::operate::dead;

/// Most messages that one step gives out.
const GIVEN_MAX: i64 = 200;
/// Nothing more is given out while so many have no outcome.
const PENDING_MAX: i64 = 2_000;
const OUTCOMES: i64 = 2_000;
const LOOKS: usize = 20;

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
pub(crate) async fn step(desk: &Desk) -> Result<Stepped, StoreError> {
    const WHAT: &str = "carry out operations";
    let mut stepped = Stepped::default();
    for mut due in desk.call(WHAT, async |conn: &mut Conn| due(conn).await).await? {
        for _ in 0..LOOKS {
            let work = async |conn: &mut Conn| {
                let scope = Scope { kind: due.kind, side: due.side, route: &due.route, filter: &due.filter };
                let found = candidates(conn, &scope, due.cursor, due.upto).await?;
                let found = found.at_most(usize::try_from(due.may).unwrap_or(0));
                Ok((take(conn, &due, &found).await?, found))
            };
            let (given, found) = desk.call(WHAT, work).await?;
            let Some(given) = given else { break };
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

/// Looks what became of messages that operations gave out, and moves the operations on. One that another process looks at is passed by.
async fn due(conn: &mut Conn) -> Result<Vec<Due>, Failed> {
    let any = "select 1 from postroom_operations where ended_at is null limit 1";
    if conn.query_first::<i64, _>(any).await?.is_none() {
        return Ok(Vec::new());
    }
    let mut tx = begin(conn).await?;
    let sql = "select id, kind, side, route, filter, upto_seq, cursor_seq, new_ids, actor, reason, state, canary, canary_done, goes_on, rate,
                      released, read_all, timestampdiff(microsecond, stepped_at, utc_timestamp(6)) as since_us
                 from postroom_operations o
                where ended_at is null
                  and (state in ('running', 'cancelled') or exists (select 1 from postroom_operation_watch w where w.operation = o.id))
                order by state = 'running' desc, created_at limit 200 for update skip locked";
    let rows: Vec<Row> = tx.query(sql).await?;
    let mut going_on = Vec::new();
    for mut row in rows {
        let row = &mut row;
        let mut due = Due {
            id: get(row, "id")?,
            kind: word(row, "kind", OperationKind::of)?,
            side: word(row, "side", Side::of)?,
            route: get(row, "route")?,
            filter: serde_json::from_str(&get::<String>(row, "filter")?)?,
            upto: get(row, "upto_seq")?,
            cursor: get(row, "cursor_seq")?,
            new_ids: get(row, "new_ids")?,
            may: GIVEN_MAX,
            deed: Deed { actor: get(row, "actor")?, reason: get(row, "reason")? },
        };
        let standing = Standing {
            state: word(row, "state", OperationState::of)?,
            canary: get(row, "canary")?,
            canary_done: get(row, "canary_done")?,
            goes_on: get(row, "goes_on")?,
            rate: get(row, "rate")?,
            released: get(row, "released")?,
            read_all: get(row, "read_all")?,
            since_us: get(row, "since_us")?,
        };
        tally(&mut tx, &due).await?;
        if let Some(may) = moved_on(&mut tx, &due, &standing).await? {
            due.may = may;
            going_on.push(due);
        }
    }
    tx.commit().await?;
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
    since_us: i64,
}

/// Takes what has an outcome off the watched ones, and counts it.
async fn tally(tx: &mut impl Queryable, due: &Due) -> Result<(), Error> {
    let (waits, outcome) = match due.side {
        // What is gone from where it waited was published, or handled, unless it died or its route was forgotten.
        Side::Out => (
            "select 1 from postroom_parked p where p.route = :route and p.seq = w.seq and p.id = w.message_id",
            "coalesce(w.cause, if(exists (select 1 from postroom_routes r where r.name = :route), 'done', 'removed'))",
        ),
        Side::In => (
            "select 1 from postroom_inbox_messages m where m.consumer = :route and m.id = w.message_id",
            "coalesce(w.cause, if(exists (select 1 from postroom_inbox i where i.consumer = :route and i.message_id = w.message_id),
                                  'done', 'removed'))",
        ),
    };
    let sql = format!(
        "select w.seq, w.message_id, {outcome} from postroom_operation_watch w
          where w.operation = :id and not exists ({waits}) limit {OUTCOMES}"
    );
    let ended: Vec<(i64, String, String)> = tx.exec(sql, params! { "id" => &due.id, "route" => &due.route }).await?;
    if ended.is_empty() {
        return Ok(());
    }
    let gone: Vec<(i64, &String)> = ended.iter().map(|(seq, id, _)| (*seq, id)).collect();
    let sql = "delete w from json_table(?, '$[*]' columns (seq bigint path '$[0]', id char(36) character set ascii path '$[1]')) n
                 straight_join postroom_operation_watch w force index (primary) on w.operation = ? and w.seq = n.seq and w.message_id = n.id";
    tx.exec_drop(sql, (json(&gone), &due.id)).await?;
    let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
    for (_, _, outcome) in &ended {
        *counts.entry(outcome).or_default() += 1;
    }
    for (outcome, messages) in counts {
        count(tx, &due.id, outcome, messages).await?;
    }
    Ok(())
}

async fn count(tx: &mut impl Queryable, operation: &str, outcome: &str, messages: i64) -> Result<(), Error> {
    let sql = "insert into postroom_operation_tallies (operation, outcome, messages) values (?, ?, ?)
                   on duplicate key update messages = messages + values(messages)";
    tx.exec_drop(sql, (operation, outcome, messages)).await
}

/// Ends an operation, or its canary; how many messages it may give out now, if it goes on.
async fn moved_on(tx: &mut impl Queryable, due: &Due, standing: &Standing) -> Result<Option<i64>, Error> {
    let sql = "select count(*) from postroom_operation_watch where operation = ?";
    let pending: i64 = tx.exec_first(sql, (&due.id,)).await?.unwrap_or_default();
    let known: Option<i64> = tx.exec_first("select 1 from postroom_routes where name = ?", (&due.route,)).await?;
    let gone = due.side == Side::Out && known.is_none();
    if gone && standing.state != OperationState::Cancelled {
        let sql = "update postroom_operations set state = 'cancelled', note = 'the route is gone' where id = ?";
        tx.exec_drop(sql, (&due.id,)).await?;
    }
    if gone || standing.state == OperationState::Cancelled || standing.read_all {
        if pending == 0 {
            let sql = "update postroom_operations set state = if(state = 'cancelled', state, 'done'), ended_at = utc_timestamp(6) where id = ?";
            tx.exec_drop(sql, (&due.id,)).await?;
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
                canary_ended(tx, due, standing).await?;
            }
            return Ok(None);
        }
    } else if let Some(rate) = standing.rate {
        // The clock was ahead at the last step, and is not any more.
        if standing.since_us < -2_000_000 {
            let sql = "update postroom_operations set stepped_at = utc_timestamp(6) where id = ?";
            tx.exec_drop(sql, (&due.id,)).await?;
        }
        // A pause is not caught up with.
        may = rate.saturating_mul(standing.since_us.clamp(0, 1_000_000)) / 1_000_000;
    }
    let may = may.min(GIVEN_MAX).min(PENDING_MAX - pending);
    Ok((may > 0).then_some(may))
}

async fn canary_ended(tx: &mut impl Queryable, due: &Due, standing: &Standing) -> Result<(), Error> {
    let sql = "select cast(coalesce(sum(messages), 0) as signed) from postroom_operation_tallies where operation = ? and outcome <> 'done'";
    let failed: i64 = tx.exec_first(sql, (&due.id,)).await?.unwrap_or_default();
    let given = standing.released;
    let (state, note) = match (failed, standing.goes_on) {
        (0, true) => ("running", None),
        (0, false) => ("waiting", Some(format!("all {given} canary messages went through"))),
        _ => ("waiting", Some(format!("{failed} of the {given} canary messages failed"))),
    };
    let sql = "update postroom_operations set canary_done = 1, state = ?, note = ?, stepped_at = utc_timestamp(6) where id = ?";
    tx.exec_drop(sql, (state, note, &due.id)).await
}

/// Gives these out, or back, or deletes them. None: somebody else has moved the operation on, or stopped it.
async fn take(conn: &mut Conn, due: &Due, found: &Candidates) -> Result<Option<i64>, Failed> {
    let mut tx = begin(conn).await?;
    let ours = "select 1 from postroom_operations where id = ? and state = 'running' and cursor_seq = ? and read_all = 0 for update";
    let ours: Option<i64> = tx.exec_first(ours, (&due.id, due.cursor)).await?;
    if ours.is_none() {
        return Ok(None);
    }
    let ready: Vec<&Candidate> = found.found.iter().filter(|candidate| candidate.ready).collect();
    let given = give(&mut tx, due, &ready).await?;
    if due.kind != OperationKind::Discard && !given.is_empty() {
        let sql = "insert into postroom_operation_watch (operation, seq, message_id)
                   select ?, n.at_seq, n.at_id from json_table(?, '$[*]' columns (at_seq bigint path '$[0]', at_id char(36) character set ascii path '$[1]')) n
                    where true on duplicate key update postroom_operation_watch.seq = postroom_operation_watch.seq";
        tx.exec_drop(sql, (&due.id, json(&given))).await?;
    }
    let ids: Vec<String> = given.into_iter().map(|(_, id)| id).collect();
    let given = i64::try_from(ids.len()).unwrap_or(i64::MAX);
    if given > 0 {
        let action = match (due.kind, due.side) {
            (OperationKind::Replay, _) => "replay".to_owned(),
            (kind, Side::Out) => format!("dead.{kind}"),
            (kind, Side::In) => format!("inbox.{kind}"),
        };
        let about = serde_json::json!({ "operation": due.id }).to_string();
        audit(&mut tx, &due.deed, &action, &about, &ids).await?;
        if due.kind == OperationKind::Discard {
            count(&mut tx, &due.id, "done", given).await?;
        }
    }
    let left = i64::try_from(found.found.len()).unwrap_or(i64::MAX) - given;
    // What was given out is paid with its share of a second; at most one second is saved up.
    let sql = "update postroom_operations
                  set stepped_at = case when :given = 0 then stepped_at when rate is null then utc_timestamp(6)
                                        else least(utc_timestamp(6) + interval 1 second,
                                                   timestampadd(microsecond, :given * 1000000 div rate,
                                                                greatest(stepped_at, utc_timestamp(6) - interval 1 second))) end,
                      released = released + :given, skipped = skipped + :left, cursor_seq = :to, read_all = :all
                where id = :id";
    let parameters = params! {
        "given" => given, "left" => left, "to" => found.to_seq, "all" => found.all_read, "id" => &due.id
    };
    tx.exec_drop(sql, parameters).await?;
    tx.commit().await?;
    Ok(Some(given))
}

/// Gives these out, or back, or deletes them; returns the seqs and ids of those that it was done to.
async fn give(tx: &mut Transaction<'_>, due: &Due, ready: &[&Candidate]) -> Result<Vec<(i64, String)>, Error> {
    let place = |candidate: &&Candidate| (candidate.headline.seq, candidate.headline.id.clone());
    let places: Vec<(i64, String)> = ready.iter().map(place).collect();
    if places.is_empty() {
        return Ok(Vec::new());
    }
    let done: HashSet<String> = match (due.kind, due.side) {
        (OperationKind::Replay, _) => {
            lock_lanes_of(tx, &due.route, "outbox", &places).await?;
            return replay(tx, due, ready).await;
        }
        (_, Side::Out) => {
            lock_lanes_of(tx, &due.route, "dead_letters", &places).await?;
            let done = match due.kind {
                OperationKind::Retry => dead::retry(tx, &due.route, &places).await?,
                _ => dead::discard(tx, &due.route, &places).await?,
            };
            done.into_iter().collect()
        }
        (kind, Side::In) => {
            let mut done = HashSet::new();
            for (_, id) in &places {
                let is_done = match kind {
                    OperationKind::Retry => dead::retry_in(tx, &due.route, id).await?,
                    _ => dead::discard_in(tx, &due.route, id).await?,
                };
                if is_done {
                    done.insert(id.clone());
                }
            }
            done
        }
    };
    Ok(places.into_iter().filter(|(_, id)| done.contains(id)).collect())
}

async fn lock_lanes_of(
    tx: &mut Transaction<'_>,
    route: &str,
    table: &str,
    places: &[(i64, String)],
) -> Result<(), Error> {
    let seqs: Vec<i64> = places.iter().map(|(seq, _)| *seq).collect();
    let of_route = if table == "outbox" { "" } else { "and x.route = :route" };
    let sql = format!(
        "select distinct x.lane from json_table(:seqs, '$[*]' columns (at_seq bigint path '$')) n
           straight_join postroom_{table} x on x.seq = n.at_seq {of_route}"
    );
    let lanes: Vec<i64> = tx.exec(sql, params! { "seqs" => json(&seqs), "route" => route }).await?;
    dead::lock_lanes(tx, route, &lanes.into_iter().collect()).await
}

async fn replay(tx: &mut Transaction<'_>, due: &Due, ready: &[&Candidate]) -> Result<Vec<(i64, String)>, Error> {
    let new_id = |candidate: &&Candidate| match due.new_ids {
        true => MessageId::new().to_string(),
        false => candidate.headline.id.clone(),
    };
    let list: Vec<(i64, &String, String)> =
        ready.iter().map(|candidate| (candidate.headline.seq, &candidate.headline.id, new_id(candidate))).collect();
    // Looked at again: it was ready before this transaction began, and nothing changes now.
    const LIST: &str =
        "json_table(:list, '$[*]' columns (at_seq bigint path '$[0]', at_id char(36) character set ascii path '$[1]',
                                                          new_id char(36) character set ascii path '$[2]')) n
           join postroom_outbox o on o.seq = n.at_seq and o.id = n.at_id";
    let sql = format!(
        "select straight_join o.seq, n.new_id, coalesce(o.`key`, o.aggregate_id) from {LIST}
          where o.place <= (select l.position from postroom_lanes l where l.route = :route and l.lane = o.lane)
            and not exists (select 1 from postroom_parked p where p.route = :route and p.seq = o.seq)
            and not exists (select 1 from postroom_dead_letters d where d.route = :route and d.seq = o.seq and d.id = o.id)
          order by o.seq"
    );
    let parameters = params! { "list" => json(&list), "route" => &due.route };
    let given: Vec<(i64, String, Option<String>)> = tx.exec(sql, parameters).await?;
    if given.is_empty() {
        return Ok(Vec::new());
    }
    let seqs: HashSet<i64> = given.iter().map(|(seq, _, _)| *seq).collect();
    let list: Vec<_> = list.into_iter().filter(|(seq, _, _)| seqs.contains(seq)).collect();
    let rest = COPIED.replacen("bytes, id,", "bytes,", 1);
    let headers = match due.new_ids {
        true => "json_set(coalesce(o.headers, '{}'), '$.\"postroom-replay-of\"', o.id)",
        false => "o.headers",
    };
    let copied = rest.replace("headers", headers);
    let sql = format!(
        "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_at, waits_since, history, id, {rest})
         select straight_join :route, o.seq, o.lane, coalesce(o.`key`, o.aggregate_id), if(coalesce(o.`key`, o.aggregate_id) is null, 'retry', 'queued'), 0,
                if(coalesce(o.`key`, o.aggregate_id) is null, utc_timestamp(6), null), utc_timestamp(6), '[]', n.new_id, {copied}
           from {LIST}"
    );
    let parameters = params! { "list" => json(&list), "route" => &due.route };
    tx.exec_drop(sql, parameters).await?;
    let keys: BTreeSet<&String> = given.iter().filter_map(|(_, _, key)| key.as_ref()).collect();
    promote(tx, &due.route, &keys.into_iter().collect::<Vec<_>>()).await?;
    Ok(given.into_iter().map(|(seq, id, _)| (seq, id)).collect())
}
