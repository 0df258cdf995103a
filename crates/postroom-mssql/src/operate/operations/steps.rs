//! The steps of operations. Each is one short transaction.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use postroom::{
    Candidate, Candidates, Deed, MessageId, OperationFilter, OperationKind, OperationState, Side, Stepped, StoreError,
};
use tiberius::error::Error;

use super::candidates::{Scope, candidates};
use super::word;
use crate::conn::Conn;
use crate::desk::{Desk, Failed, begin};
use crate::log::COPIED;
use crate::log::record::promote;
use crate::operate::audit::audit;
use crate::operate::dead;
use crate::sql::{NOW, get, json, later, named};

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
    let any = "select top (1) 1 from postroom_operations where ended_at is null";
    if conn.first::<i64>(any, named! {}).await?.is_none() {
        return Ok(Vec::new());
    }
    let tx = begin(conn).await?;
    let sql = format!(
        "select top (200) o.id, o.kind, o.side, o.route, o.filter, o.upto_seq, o.cursor_seq, o.new_ids, o.actor, o.reason, o.state, o.canary,
                o.canary_done, o.goes_on, o.rate, o.released, o.read_all, datediff_big(microsecond, o.stepped_at, {NOW}) as since_us
           from postroom_operations o with (updlock, rowlock, readcommittedlock, readpast)
          where o.ended_at is null
            and (o.state in ('running', 'cancelled') or exists (select 1 from postroom_operation_watch w where w.operation = o.id))
          order by case when o.state = 'running' then 0 else 1 end, o.created_at"
    );
    let rows = tx.rows(&sql, named! {}).await?;
    let mut going_on = Vec::new();
    for row in &rows {
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
        tally(tx, &due).await?;
        if let Some(may) = moved_on(tx, &due, &standing).await? {
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
async fn tally(tx: &mut Conn, due: &Due) -> Result<(), Error> {
    let (waits, outcome) = match due.side {
        // What is gone from where it waited was published, or handled, unless it died or its route was forgotten.
        Side::Out => (
            "select 1 from postroom_parked p where p.route = @route and p.seq = w.seq and p.id = w.message_id",
            "coalesce(w.cause, case when exists (select 1 from postroom_routes r where r.name = @route) then 'done' else 'removed' end)",
        ),
        Side::In => (
            "select 1 from postroom_inbox_messages m where m.consumer = @route and m.id = w.message_id",
            "coalesce(w.cause, case when exists (select 1 from postroom_inbox i where i.consumer = @route and i.message_id = w.message_id)
                                   then 'done' else 'removed' end)",
        ),
    };
    let sql = format!(
        "select top ({OUTCOMES}) w.seq, w.message_id, {outcome} from postroom_operation_watch w
          where w.operation = @id and not exists ({waits})"
    );
    let ended: Vec<(i64, String, String)> = tx.query(&sql, named! { "id" => &due.id, "route" => &due.route }).await?;
    if ended.is_empty() {
        return Ok(());
    }
    let gone: Vec<(i64, &String)> = ended.iter().map(|(seq, id, _)| (*seq, id)).collect();
    let sql = "delete w
                 from openjson(@gone) with (seq bigint '$[0]', id uniqueidentifier '$[1]') n
                 join postroom_operation_watch w with (rowlock) on w.operation = @id and w.seq = n.seq and w.message_id = n.id
               option (loop join, force order)";
    tx.exec(sql, named! { "gone" => json(&gone), "id" => &due.id }).await?;
    let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
    for (_, _, outcome) in &ended {
        *counts.entry(outcome).or_default() += 1;
    }
    for (outcome, messages) in counts {
        count(tx, &due.id, outcome, messages).await?;
    }
    Ok(())
}

async fn count(tx: &mut Conn, operation: &str, outcome: &str, messages: i64) -> Result<(), Error> {
    let parameters = named! { "id" => operation, "outcome" => outcome, "messages" => messages };
    let sql = "update postroom_operation_tallies with (updlock, holdlock) set messages = messages + @messages
                where operation = @id and outcome = @outcome";
    if tx.exec(sql, parameters.clone()).await? == 0 {
        let sql =
            "insert into postroom_operation_tallies (operation, outcome, messages) values (@id, @outcome, @messages)";
        tx.exec(sql, parameters).await?;
    }
    Ok(())
}

/// Ends an operation, or its canary; how many messages it may give out now, if it goes on.
async fn moved_on(tx: &mut Conn, due: &Due, standing: &Standing) -> Result<Option<i64>, Error> {
    let of = || named! { "id" => &due.id };
    let sql = "select count_big(*) from postroom_operation_watch where operation = @id";
    let pending: i64 = tx.first(sql, of()).await?.unwrap_or_default();
    let sql = "select 1 from postroom_routes where name = @route";
    let known: Option<i64> = tx.first(sql, named! { "route" => &due.route }).await?;
    let gone = due.side == Side::Out && known.is_none();
    if gone && standing.state != OperationState::Cancelled {
        let sql = "update postroom_operations set state = 'cancelled', note = N'the route is gone' where id = @id";
        tx.exec(sql, of()).await?;
    }
    if gone || standing.state == OperationState::Cancelled || standing.read_all {
        if pending == 0 {
            let sql = format!(
                "update postroom_operations set state = case when state = 'cancelled' then state else 'done' end, ended_at = {NOW} where id = @id"
            );
            tx.exec(&sql, of()).await?;
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
            let sql = format!("update postroom_operations set stepped_at = {NOW} where id = @id");
            tx.exec(&sql, of()).await?;
        }
        // A pause is not caught up with.
        may = rate.saturating_mul(standing.since_us.clamp(0, 1_000_000)) / 1_000_000;
    }
    let may = may.min(GIVEN_MAX).min(PENDING_MAX - pending);
    Ok((may > 0).then_some(may))
}

async fn canary_ended(tx: &mut Conn, due: &Due, standing: &Standing) -> Result<(), Error> {
    let sql = "select coalesce(convert(bigint, sum(messages)), 0) from postroom_operation_tallies where operation = @id and outcome <> 'done'";
    let failed: i64 = tx.first(sql, named! { "id" => &due.id }).await?.unwrap_or_default();
    let given = standing.released;
    let (state, note) = match (failed, standing.goes_on) {
        (0, true) => ("running", None),
        (0, false) => ("waiting", Some(format!("all {given} canary messages went through"))),
        _ => ("waiting", Some(format!("{failed} of the {given} canary messages failed"))),
    };
    let sql = format!(
        "update postroom_operations set canary_done = 1, state = @state, note = @note, stepped_at = {NOW} where id = @id"
    );
    tx.exec(&sql, named! { "state" => state, "note" => note, "id" => &due.id }).await.map(drop)
}

/// Gives these out, or back, or deletes them. None: somebody else has moved the operation on, or stopped it.
async fn take(conn: &mut Conn, due: &Due, found: &Candidates) -> Result<Option<i64>, Failed> {
    let tx = begin(conn).await?;
    let ours = "select 1 from postroom_operations with (updlock, rowlock)
                 where id = @id and state = 'running' and cursor_seq = @cursor and read_all = 0";
    let ours: Option<i64> = tx.first(ours, named! { "id" => &due.id, "cursor" => due.cursor }).await?;
    if ours.is_none() {
        return Ok(None);
    }
    let ready: Vec<&Candidate> = found.found.iter().filter(|candidate| candidate.ready).collect();
    let given = give(tx, due, &ready).await?;
    if due.kind != OperationKind::Discard && !given.is_empty() {
        let sql = "insert into postroom_operation_watch (operation, seq, message_id)
                   select @id, n.seq, n.message_id from openjson(@given) with (seq bigint '$[0]', message_id uniqueidentifier '$[1]') n
                    where not exists (select 1 from postroom_operation_watch w where w.operation = @id and w.seq = n.seq and w.message_id = n.message_id)";
        tx.exec(sql, named! { "id" => &due.id, "given" => json(&given) }).await?;
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
        audit(tx, &due.deed, &action, &about, &ids).await?;
        if due.kind == OperationKind::Discard {
            count(tx, &due.id, "done", given).await?;
        }
    }
    let left = i64::try_from(found.found.len()).unwrap_or(i64::MAX) - given;
    // What was given out is paid with its share of a second; at most one second is saved up.
    let sql = format!(
        "update o set stepped_at = case when @given = 0 then o.stepped_at when o.rate is null then {NOW}
                                        when x.paid > dateadd(second, 1, {NOW}) then dateadd(second, 1, {NOW}) else x.paid end,
                      released = o.released + @given, skipped = o.skipped + @left, cursor_seq = @to, read_all = @all
           from postroom_operations o
           join (select p.id, {} as paid from postroom_operations p where p.id = @id) x on x.id = o.id
          where o.id = @id",
        later(
            "(@given * 1000000 / coalesce(p.rate, 1))",
            &format!("case when p.stepped_at > dateadd(second, -1, {NOW}) then p.stepped_at else dateadd(second, -1, {NOW}) end")
        )
    );
    let parameters = named! {
        "given" => given, "left" => left, "to" => found.to_seq, "all" => found.all_read, "id" => &due.id
    };
    tx.exec(&sql, parameters).await?;
    tx.commit().await?;
    Ok(Some(given))
}

/// Gives these out, or back, or deletes them; returns the seqs and ids of those that it was done to.
async fn give(tx: &mut Conn, due: &Due, ready: &[&Candidate]) -> Result<Vec<(i64, String)>, Error> {
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

async fn lock_lanes_of(tx: &mut Conn, route: &str, table: &str, places: &[(i64, String)]) -> Result<(), Error> {
    let seqs: Vec<i64> = places.iter().map(|(seq, _)| *seq).collect();
    let of_route = if table == "outbox" { "" } else { "and x.route = @route" };
    let sql = format!(
        "select distinct x.lane from openjson(@seqs) with (seq bigint '$') n join postroom_{table} x on x.seq = n.seq {of_route} option (loop join, force order)"
    );
    let lanes: Vec<i64> = tx.query(&sql, named! { "seqs" => json(&seqs), "route" => route }).await?;
    dead::lock_lanes(tx, route, &lanes.into_iter().collect()).await
}

async fn replay(tx: &mut Conn, due: &Due, ready: &[&Candidate]) -> Result<Vec<(i64, String)>, Error> {
    let new_id = |candidate: &&Candidate| match due.new_ids {
        true => MessageId::new().to_string(),
        false => candidate.headline.id.clone(),
    };
    let list: Vec<(i64, &String, String)> =
        ready.iter().map(|candidate| (candidate.headline.seq, &candidate.headline.id, new_id(candidate))).collect();
    // Looked at again: it was ready before this transaction began, and nothing changes now.
    const LIST: &str =
        "openjson(@list) with (seq bigint '$[0]', id uniqueidentifier '$[1]', new_id uniqueidentifier '$[2]') n
           join postroom_outbox o on o.seq = n.seq and o.id = n.id";
    let sql = format!(
        "select o.seq, n.new_id, coalesce(o.[key], o.aggregate_id) from {LIST}
          where o.place <= (select l.position from postroom_lanes l where l.route = @route and l.lane = o.lane)
            and not exists (select 1 from postroom_parked p where p.route = @route and p.seq = o.seq)
            and not exists (select 1 from postroom_dead_letters d where d.route = @route and d.seq = o.seq and d.id = o.id)
          order by o.seq"
    );
    let parameters = named! { "list" => json(&list), "route" => &due.route };
    let given: Vec<(i64, String, Option<String>)> = tx.query(&sql, parameters).await?;
    if given.is_empty() {
        return Ok(Vec::new());
    }
    let seqs: HashSet<i64> = given.iter().map(|(seq, _, _)| *seq).collect();
    let list: Vec<_> = list.into_iter().filter(|(seq, _, _)| seqs.contains(seq)).collect();
    let rest = COPIED.replacen("bytes, id,", "bytes,", 1);
    let headers = match due.new_ids {
        true => "json_modify(coalesce(o.headers, N'{}'), N'$.\"postroom-replay-of\"', lower(convert(nchar(36), o.id)))",
        false => "o.headers",
    };
    let copied = dead::copied_of("o").replacen("o.bytes, o.id,", "o.bytes,", 1).replace("o.headers", headers);
    let sql = format!(
        "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_at, waits_since, history, id, {rest})
         select @route, o.seq, o.lane, coalesce(o.[key], o.aggregate_id),
                case when coalesce(o.[key], o.aggregate_id) is null then 'retry' else 'queued' end, 0,
                case when coalesce(o.[key], o.aggregate_id) is null then {NOW} end, {NOW}, N'[]', n.new_id, {copied}
           from {LIST}
         option (loop join, force order)"
    );
    tx.exec(&sql, named! { "list" => json(&list), "route" => &due.route }).await?;
    let keys: BTreeSet<&String> = given.iter().filter_map(|(_, _, key)| key.as_ref()).collect();
    promote(tx, &due.route, &keys.into_iter().collect::<Vec<_>>()).await?;
    Ok(given.into_iter().map(|(seq, id, _)| (seq, id)).collect())
}
