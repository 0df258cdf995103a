//! Operations on many messages: how they begin and stand, and the groups of dead letters that they may be about.

mod candidates;
mod steps;

use std::collections::{BTreeMap, HashSet};

use postroom::{
    Cause, DeadCursor, DeadNote, Deed, Headline, NewOperation, OperationEffects, OperationId, OperationKind,
    OperationState, ReplayPlace, ShownOperation, Side, Steer, StoreError,
};
use tiberius::Row;
use tiberius::error::Error;

use super::word;
use crate::conn::Conn;
use crate::desk::{Failed, begin as begin_tx};
use crate::operate::audit::audit;
use crate::sql::{NOW, get, json, named, seconds_since};

pub(crate) use candidates::survey;
use candidates::upto;
pub(crate) use steps::step;

/// Messages of which one statement asks what became of them.
const ASKED: usize = 5_000;

/// What dead letters died of, from behind this place on.
pub(crate) async fn headlines(
    conn: &mut Conn,
    side: Side,
    after: Option<&DeadCursor>,
    limit: i64,
) -> Result<Vec<Headline>, Failed> {
    let (table, route) = match side {
        Side::Out => ("postroom_dead_letters", "route"),
        Side::In => ("postroom_dead_consume", "consumer"),
    };
    let sql = format!(
        "select top (@limit) {route} as route, seq, id, type, cause, left(error, 1000) as error, {} as died_ago from {table}
          where {route} > @route or ({route} = @route and (seq > @seq or (seq = @seq and (@id is null or id > @id))))
          order by {route}, seq, id",
        seconds_since("died_at")
    );
    let parameters = named! {
        "route" => after.map(|after| after.route.as_str()).unwrap_or_default(),
        "seq" => after.map(|after| after.seq).unwrap_or_default(),
        "id" => after.map(|after| after.id.as_str()), "limit" => limit.max(0)
    };
    let headline = |row: &Row| {
        Ok::<_, Error>(Headline {
            route: get(row, "route")?,
            seq: get(row, "seq")?,
            id: get(row, "id")?,
            kind: get(row, "type")?,
            cause: word(row, "cause", Cause::of)?,
            error: get(row, "error")?,
            died_seconds_ago: get(row, "died_ago")?,
        })
    };
    let rows = conn.rows(&sql, parameters).await?;
    Ok(rows.iter().map(headline).collect::<Result<_, _>>()?)
}

/// What was written about these groups, newest first.
pub(crate) async fn dead_notes(conn: &mut Conn, groups: &[String]) -> Result<Vec<(String, DeadNote)>, Failed> {
    let sql = format!(
        "select top (1000) d.dead_group, {}, d.actor, d.note
           from openjson(@groups) with (dead_group nvarchar(200) '$') n join postroom_dead_notes d on d.dead_group = n.dead_group collate Latin1_General_100_BIN2
          order by d.number desc",
        seconds_since("d.at")
    );
    let rows: Vec<(String, f64, String, String)> = conn.query(&sql, named! { "groups" => json(groups) }).await?;
    let note = |(group, seconds_ago, actor, note)| (group, DeadNote { seconds_ago, actor, note });
    Ok(rows.into_iter().map(note).collect())
}

/// Writes something about a group.
pub(crate) async fn note_dead(conn: &mut Conn, group: &str, note: &str, deed: &Deed) -> Result<(), Failed> {
    let tx = begin_tx(conn).await?;
    let sql =
        format!("insert into postroom_dead_notes (dead_group, at, actor, note) values (@group, {NOW}, @actor, @note)");
    tx.exec(&sql, named! { "group" => group, "actor" => &deed.actor, "note" => note }).await?;
    let about = serde_json::json!({ "group": group, "note": note }).to_string();
    audit(tx, deed, "dead.note", &about, &[] as &[&str]).await?;
    tx.commit().await?;
    Ok(())
}

/// Begins an operation: from now on a relay process carries it out.
pub(crate) async fn begin(
    conn: &mut Conn,
    id: OperationId,
    operation: &NewOperation,
    deed: &Deed,
) -> Result<(), Failed> {
    let NewOperation { kind, side, route, filter, planned, canary, goes_on, rate, place, new_ids } = operation;
    if *place == ReplayPlace::Behind {
        let source = "SQL Server has no place behind what waits: leave out --behind".into();
        return Err(StoreError::Refused { what: "begin the operation; nothing was changed", source }.into());
    }
    let tx = begin_tx(conn).await?;
    let upto = upto(tx, operation).await?;
    let sql = format!(
        "insert into postroom_operations (id, kind, side, route, filter, upto_seq, canary, goes_on, rate, place, new_ids, actor, reason,
                                          planned, created_at, stepped_at)
         values (@id, @kind, @side, @route, @filter, @upto, @canary, @goes_on, @rate, @place, @new_ids, @actor, @reason, @planned, {NOW}, {NOW})"
    );
    let parameters = named! {
        "id" => id.to_string(), "kind" => kind.as_str(), "side" => side.as_str(), "route" => route,
        "filter" => serde_json::to_string(filter)?, "upto" => upto, "canary" => *canary, "goes_on" => *goes_on, "rate" => *rate,
        "place" => place.as_str(), "new_ids" => *new_ids, "actor" => &deed.actor, "reason" => &deed.reason,
        "planned" => planned.map(|planned| i64::try_from(planned).unwrap_or(i64::MAX))
    };
    tx.exec(&sql, parameters).await?;
    let about = serde_json::json!({ "operation": id, "kind": kind, "side": side, "route": route, "filter": filter });
    audit(tx, deed, "operation.begin", &about.to_string(), &[] as &[&str]).await?;
    tx.commit().await?;
    Ok(())
}

/// Operations, newest first, or the one with this id.
pub(crate) async fn operations(
    conn: &mut Conn,
    id: Option<OperationId>,
    limit: i64,
) -> Result<Vec<ShownOperation>, Failed> {
    let sql = format!(
        "select top (@limit) o.id, o.kind, o.side, o.route, o.filter, o.state, o.note, o.canary, o.goes_on, o.rate, o.place, o.new_ids, o.skipped,
                o.released, o.read_all, o.actor, o.reason, o.planned,
                (select count_big(*) from postroom_operation_watch w where w.operation = o.id) as pending,
                {} as began_ago,
                convert(float, datediff_big(microsecond, o.created_at, coalesce(o.ended_at, {NOW}))) / 1000000 as lasted
           from postroom_operations o where @id is null or o.id = @id order by o.created_at desc, o.id",
        seconds_since("o.created_at")
    );
    let parameters = named! { "id" => id.map(|id| id.to_string()), "limit" => limit.max(0) };
    let rows = conn.rows(&sql, parameters).await?;
    let mut shown = Vec::with_capacity(rows.len());
    for row in &rows {
        let id: String = get(row, "id")?;
        let sql = "select outcome, messages from postroom_operation_tallies where operation = @id";
        let outcomes: Vec<(String, i64)> = conn.query(sql, named! { "id" => &id }).await?;
        shown.push(operation(row, &id, outcomes.into_iter().collect())?);
    }
    Ok(shown)
}

fn operation(row: &Row, id: &str, mut outcomes: BTreeMap<String, i64>) -> Result<ShownOperation, Failed> {
    let (done, removed) = (outcomes.remove("done").unwrap_or_default(), outcomes.remove("removed").unwrap_or_default());
    Ok(ShownOperation {
        id: id.parse().map_err(|_| Error::Conversion(format!("an operation has the id {id:?}").into()))?,
        kind: word(row, "kind", OperationKind::of)?,
        side: word(row, "side", Side::of)?,
        route: get(row, "route")?,
        filter: serde_json::from_str(&get::<String>(row, "filter")?)?,
        state: word(row, "state", OperationState::of)?,
        note: get(row, "note")?,
        canary: get(row, "canary")?,
        goes_on: get(row, "goes_on")?,
        rate: get(row, "rate")?,
        place: word(row, "place", ReplayPlace::of)?,
        new_ids: get(row, "new_ids")?,
        planned: get(row, "planned")?,
        matched: 0,
        gone: 0,
        left_alone: get(row, "skipped")?,
        given_out: get(row, "released")?,
        done,
        failed: outcomes,
        removed,
        pending: get(row, "pending")?,
        read_all: get(row, "read_all")?,
        coverage: None,
        began_seconds_ago: get(row, "began_ago")?,
        lasted_seconds: get(row, "lasted")?,
        per_second: 0.0,
        actor: get(row, "actor")?,
        reason: get(row, "reason")?,
    }
    .finished())
}

/// What became of its messages at each consumer of this database.
pub(crate) async fn effects(conn: &mut Conn, id: OperationId) -> Result<Vec<OperationEffects>, Failed> {
    let id = id.to_string();
    let sql = "select case when side = 'in' then 1 else 0 end, convert(nvarchar(33), created_at, 126) from postroom_operations where id = @id";
    let Some((handled_now, began)): Option<(bool, String)> = conn.first(sql, named! { "id" => &id }).await? else {
        return Ok(Vec::new());
    };
    let consumers = crate::operate::consumers(conn, &["inbox", "inbox_messages"]).await?;
    let empty = |consumer: &String| OperationEffects {
        consumer: consumer.clone(),
        effects: 0,
        suppressed: 0,
        waiting: 0,
        dead: 0,
        missing: 0,
    };
    let mut effects: Vec<OperationEffects> = consumers.iter().map(empty).collect();
    let sql = "select top (100) a.id, a.message_ids from postroom_audit a
                where a.at >= convert(datetime2(6), @began) and a.id > @after and a.action in ('replay', 'dead.retry', 'inbox.retry')
                  and json_value(a.filter, N'$.operation') = @operation order by a.id";
    let (mut after, mut seen) = (0_i64, HashSet::new());
    loop {
        let parameters = named! { "began" => &began, "after" => after, "operation" => &id };
        let rows: Vec<(i64, String)> = conn.query(sql, parameters).await?;
        let Some((last, _)) = rows.last() else { break };
        after = *last;
        let mut ids: Vec<String> = Vec::new();
        for (_, given) in rows {
            let given: Vec<String> = serde_json::from_str(&given)?;
            ids.extend(given.into_iter().filter(|id| seen.insert(id.clone())));
        }
        for asked in ids.chunks(ASKED) {
            for effect in &mut effects {
                add_effects(conn, effect, asked, handled_now, &began).await?;
            }
        }
    }
    Ok(if seen.is_empty() { Vec::new() } else { effects })
}

async fn add_effects(
    conn: &mut Conn,
    effect: &mut OperationEffects,
    ids: &[String],
    handled_now: bool,
    began: &str,
) -> Result<(), Error> {
    // A dead letter of a consumer was in the inbox before: without an effect.
    let sql = "select x.state, count_big(*) from (
                   select case when m.id is not null then 'waiting' when d.id is not null then 'dead' when i.message_id is null then 'missing'
                               when @now = 1 or i.processed_at >= convert(datetime2(6), @began) then 'effect' else 'suppressed' end as state
                     from openjson(@ids) with (id uniqueidentifier '$') n
                     left join postroom_inbox_messages m on m.consumer = @consumer and m.id = n.id
                     left join postroom_dead_consume d on d.consumer = @consumer and d.id = n.id
                     left join postroom_inbox i on i.consumer = @consumer and i.message_id = n.id) x
                group by x.state";
    let parameters =
        named! { "now" => handled_now, "began" => began, "ids" => json(ids), "consumer" => &effect.consumer };
    let counts: Vec<(String, i64)> = conn.query(sql, parameters).await?;
    for (state, count) in counts {
        *match state.as_str() {
            "waiting" => &mut effect.waiting,
            "dead" => &mut effect.dead,
            "missing" => &mut effect.missing,
            "effect" => &mut effect.effects,
            _ => &mut effect.suppressed,
        } += count;
    }
    Ok(())
}

/// Notes on what operations watch that it became a dead letter, in the transaction that records the death.
pub(crate) async fn note_death(tx: &mut Conn, side: &str, of: &str, id: &str, cause: &str) -> Result<(), Error> {
    let sql = "update w set cause = @cause
                 from postroom_operation_watch w
                 join postroom_operations o on o.id = w.operation and o.side = @side and o.route = @of
                where w.message_id = @id";
    tx.exec(sql, named! { "cause" => cause, "side" => side, "of" => of, "id" => id }).await.map(drop)
}

/// Pauses, resumes or cancels; false: it is in no state for that.
pub(crate) async fn steer(conn: &mut Conn, id: OperationId, what: Steer, deed: &Deed) -> Result<bool, Failed> {
    let tx = begin_tx(conn).await?;
    let (from, to) = match what {
        Steer::Pause => ("'running', 'waiting'", "paused"),
        Steer::Resume => ("'waiting', 'paused'", "running"),
        Steer::Cancel => ("'running', 'waiting', 'paused'", "cancelled"),
    };
    let sql = format!(
        "update postroom_operations set state = @to, note = null, stepped_at = {NOW} where id = @id and state in ({from})"
    );
    if tx.exec(&sql, named! { "to" => to, "id" => id.to_string() }).await? == 0 {
        return Ok(false);
    }
    let about = serde_json::json!({ "operation": id }).to_string();
    audit(tx, deed, &format!("operation.{what}"), &about, &[] as &[&str]).await?;
    tx.commit().await?;
    Ok(true)
}
