//! Which messages an operation is about.

use postroom::{
    Candidate, Candidates, Cause, Headline, NewOperation, OperationFilter, OperationKind, Side, StoreError, Survey,
};
use rusqlite::{Connection, params};

use crate::connect::{NOW, store_error, word};
use crate::operate::status::TAKES;
use crate::text::{text, text_or_null};

/// Rows that one look reads.
const ROWS: i64 = 2_000;

/// One look at what an operation would be about.
pub(crate) fn survey(
    connection: &Connection,
    operation: &NewOperation,
    mut survey: Survey,
) -> Result<Survey, StoreError> {
    let mut look = || -> Result<(), rusqlite::Error> {
        let upto = upto(connection, operation)?;
        let scope =
            Scope { kind: operation.kind, side: operation.side, route: &operation.route, filter: &operation.filter };
        let found = candidates(connection, &scope, survey.to_seq, upto)?;
        let (ids, keys) = survey.add(&found);
        let sql = "select i.consumer, count(*) from postroom_inbox i
                    where i.consumer in (select distinct consumer from postroom_inbox) and i.message_id in (select value from json_each(?1))
                    group by i.consumer";
        if !ids.is_empty() && operation.kind == OperationKind::Replay {
            let mut statement = connection.prepare(sql)?;
            let mut rows = statement.query([serde_json::json!(ids).to_string()])?;
            while let Some(row) = rows.next()? {
                *survey.remembered_by.entry(text(row, 0)?).or_default() += row.get::<_, i64>(1)?.unsigned_abs();
            }
        }
        if operation.side == Side::Out && !keys.is_empty() && survey.blocked_keys.len() < 20 {
            let sql = "select distinct ordering_key from postroom_blocked_keys
                        where route = ?1 and ordering_key in (select value from json_each(?2)) order by 1 limit 20";
            let mut statement = connection.prepare(sql)?;
            let mut rows = statement.query(params![operation.route, serde_json::json!(keys).to_string()])?;
            while let Some(row) = rows.next()? {
                let key = text(row, 0)?;
                if survey.blocked_keys.len() < 20 && !survey.blocked_keys.contains(&key) {
                    survey.blocked_keys.push(key);
                }
            }
        }
        Ok(())
    };
    look().map_err(|error| store_error("look what would be done", error))?;
    Ok(survey)
}

/// The last seq that an operation may be about: what is written, or dies, later is not meant.
pub(super) fn upto(connection: &Connection, operation: &NewOperation) -> Result<i64, rusqlite::Error> {
    let sql = match (operation.kind, operation.side) {
        (OperationKind::Replay, _) => "select coalesce(max(seq), 0) from postroom_outbox where ?1 is not null",
        (_, Side::Out) => "select coalesce(max(seq), 0) from postroom_dead_letters where route = ?1",
        (_, Side::In) => "select coalesce(max(seq), 0) from postroom_dead_consume where consumer = ?1",
    };
    connection.query_row(sql, [&operation.route], |row| row.get(0))
}

pub(super) struct Scope<'a> {
    pub kind: OperationKind,
    pub side: Side,
    pub route: &'a str,
    pub filter: &'a OperationFilter,
}

pub(super) fn candidates(
    connection: &Connection,
    scope: &Scope<'_>,
    from: i64,
    upto: i64,
) -> Result<Candidates, rusqlite::Error> {
    let Scope { kind, side, route, filter } = scope;
    let (table, of, id, key, at, cause, error, takes) = match (kind, side) {
        (OperationKind::Replay, _) => (
            "postroom_outbox",
            "?1 is not null",
            "o.id",
            "coalesce(o.key, o.aggregate_id)",
            "o.occurred_ms",
            "'permanent'",
            "''",
            format!("exists (select 1 from postroom_routes r where r.name = ?1 and {TAKES})"),
        ),
        (_, Side::Out) => (
            "postroom_dead_letters",
            "route = ?1",
            "o.id",
            "coalesce(o.key, o.aggregate_id)",
            "o.died_ms",
            "o.cause",
            "substr(o.error, 1, 1000)",
            "true".to_owned(),
        ),
        (_, Side::In) => (
            "postroom_dead_consume",
            "consumer = ?1",
            "o.id",
            "o.ordering_key",
            "o.died_ms",
            "o.cause",
            "substr(o.error, 1, 1000)",
            "true".to_owned(),
        ),
    };
    let ready = if *kind == OperationKind::Replay {
        "o.seq <= coalesce((select l.position_seq from postroom_lanes l where l.route = ?1), 0)
           and not exists (select 1 from postroom_parked p where p.route = ?1 and p.seq = o.seq)
           and not exists (select 1 from postroom_dead_letters d where d.route = ?1 and d.seq = o.seq)"
    } else {
        "1"
    };
    let page = format!("select seq from {table} where {of} and seq > ?2 and seq <= ?3 order by seq limit ?4");
    let (rows, last): (i64, Option<i64>) = connection.query_row(
        &format!("select count(*), max(seq) from ({page})"),
        params![route, from, upto, ROWS],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )?;
    let to_seq = if rows < ROWS { upto } else { last.unwrap_or(upto) };
    let sql = format!(
        "select o.seq, {id}, o.type, o.topic, {key}, {at}, {cause}, {error}, ({NOW} - {at}) / 1000.0, {ready}
           from {table} o
          where o.{of_table} and o.seq > ?2 and o.seq <= ?4
            and (?3 is null or replace(lower({id}), '-', '') in (select replace(value, '-', '') from json_each(?3)))
            and (?5 is null or {at} >= ?5) and (?6 is null or {at} < ?6) and (?7 is null or o.topic = ?7)
            and (?8 is null or o.type = ?8) and (?9 is null or {key} = ?9) and (?10 is null or o.tenant_id = ?10)
            and (?11 is null or o.aggregate_id = ?11) and (?12 is null or instr({error}, ?12) > 0) and {takes}
          order by o.seq",
        of_table = if *kind == OperationKind::Replay { "seq > 0" } else { of },
    );
    let ids = (!filter.ids.is_empty()).then(|| serde_json::json!(filter.ids).to_string());
    let mut statement = connection.prepare(&sql)?;
    let mut found = Vec::new();
    let mut rows = statement.query(params![
        route,
        from,
        ids,
        to_seq,
        filter.since_ms,
        filter.until_ms,
        filter.topic,
        filter.kind,
        filter.key,
        filter.tenant_id,
        filter.aggregate_id,
        filter.error,
    ])?;
    while let Some(row) = rows.next()? {
        let headline = Headline {
            route: (*route).to_owned(),
            seq: row.get(0)?,
            id: text(row, 1)?,
            kind: text(row, 2)?,
            cause: word(row, 6, Cause::of)?,
            error: text(row, 7)?,
            died_seconds_ago: row.get(8)?,
        };
        found.push(Candidate {
            headline,
            topic: text(row, 3)?,
            key: text_or_null(row, 4)?,
            at_ms: row.get(5)?,
            ready: row.get(9)?,
        });
    }
    Ok(Candidates { found, to_seq, all_read: to_seq >= upto }.of_group(*side, filter))
}
