//! One side of a comparison of messages with effects. The file is here, so ids are read and counted in this process.

use std::collections::{HashMap, HashSet};

use postroom::{
    AggregateChange, Consumer, DISCOVER, DISCOVERED_MAX, Discovered, Fate, IdPrints, MessageId, Reconciled, Span,
    StoreError, Tally, TopicFilter, Unhandled, Unwritten, id_ms,
};
use rusqlite::{Connection, OptionalExtension, Row, ToSql, params};
use uuid::Uuid;

use crate::connect::{NOW, store_error};
use crate::operate::status::TAKES;
use crate::text::{text, text_or_null};

const WHAT: &str = "compare messages with effects";
const CHANGES: &str = "run the query `changes` of the comparison (it returns aggregate type, aggregate id and version, and has the parameters ?1 and ?2)";
/// Groups of one span that are told apart.
const GROUPS_MAX: usize = 10_000;

fn failed(error: rusqlite::Error) -> StoreError {
    store_error(WHAT, error)
}

fn uuid(row: &Row<'_>, column: usize) -> Result<Uuid, rusqlite::Error> {
    // The table's check makes it 32 hexadecimal digits, however they are hyphenated.
    let id: String = row.get(column)?;
    Ok(Uuid::from_u128(u128::from_str_radix(&id.replace('-', ""), 16).unwrap_or_default()))
}

/// Calls `each` with the id and the topic of every message of a span.
fn outbox(connection: &Connection, span: Span, mut each: impl FnMut(Uuid, String)) -> Result<(), rusqlite::Error> {
    let (from, to) = span.ids();
    let sql = "select o.id, o.topic from postroom_outbox o
                where replace(lower(o.id), '-', '') >= ?1 and replace(lower(o.id), '-', '') < ?2
                order by replace(lower(o.id), '-', '')";
    let mut statement = connection.prepare(sql)?;
    let mut rows = statement.query([from.simple().to_string(), to.simple().to_string()])?;
    while let Some(row) = rows.next()? {
        each(uuid(row, 0)?, text(row, 1)?);
    }
    Ok(())
}

fn inbox(
    connection: &Connection,
    consumer: &Consumer,
    span: Span,
    mut each: impl FnMut(Uuid),
) -> Result<(), rusqlite::Error> {
    let (from, to) = span.ids();
    let sql = "select x.message_id from postroom_inbox x
                where x.consumer = ?1 and x.message_id >= ?2 and x.message_id < ?3 order by x.message_id";
    let mut statement = connection.prepare(sql)?;
    let mut rows = statement.query([consumer.as_str(), &from.to_string(), &to.to_string()])?;
    while let Some(row) = rows.next()? {
        each(uuid(row, 0)?);
    }
    Ok(())
}

/// The times in the oldest and the newest id.
pub(crate) fn outbox_times(connection: &Connection, plausible: Span) -> Result<Option<Span>, StoreError> {
    let (from, to) = plausible.ids();
    let edge = |direction: &str| {
        let sql = format!(
            "select id from postroom_outbox where replace(lower(id), '-', '') >= ?1 and replace(lower(id), '-', '') < ?2
              order by replace(lower(id), '-', '') {direction} limit 1"
        );
        connection.query_row(&sql, [from.simple().to_string(), to.simple().to_string()], |row| uuid(row, 0)).optional()
    };
    let others: i64 = connection
        .query_row(
            "select count(*) from (select replace(id, '-', '') as id from postroom_outbox order by seq desc limit 1000) where substr(id, 13, 1) <> '7'",
            [],
            |row| row.get(0),
        )
        .map_err(failed)?;
    if others > 0 {
        let source = format!(
            "{others} of the newest messages have ids that are not UUIDv7, so there is no time in them to compare by"
        );
        return Err(StoreError::Refused { what: WHAT, source: source.into() });
    }
    let (oldest, newest) = (edge("asc").map_err(failed)?, edge("desc").map_err(failed)?);
    Ok(oldest.zip(newest).map(|(oldest, newest)| Span { from_ms: id_ms(&oldest), to_ms: id_ms(&newest) + 1 }))
}

/// Messages whose ids lie outside a span.
pub(crate) fn outbox_outside(connection: &Connection, span: Span) -> Result<u64, StoreError> {
    let (from, to) = span.ids();
    let sql = "select (select count(*) from (select 1 from postroom_outbox where replace(lower(id), '-', '') < ?1 limit 10000))
                    + (select count(*) from (select 1 from postroom_outbox where replace(lower(id), '-', '') >= ?2 limit 10000))";
    let parameters = [from.simple().to_string(), to.simple().to_string()];
    connection.query_row(sql, parameters, |row| row.get::<_, i64>(0)).map(i64::unsigned_abs).map_err(failed)
}

/// Ids of the outbox, piece by piece.
pub(crate) fn outbox_prints(
    connection: &Connection,
    topics: &TopicFilter,
    span: Span,
    piece_ms: i64,
) -> Result<IdPrints, StoreError> {
    let mut prints = IdPrints::new();
    outbox(connection, span, |id, topic| {
        if topics.takes(&topic) {
            prints.entry(id_ms(&id).div_euclid(piece_ms)).or_default().add(&id);
        }
    })
    .map_err(failed)?;
    Ok(prints)
}

/// Ids of the outbox.
pub(crate) fn outbox_ids(
    connection: &Connection,
    topics: &TopicFilter,
    span: Span,
) -> Result<Vec<MessageId>, StoreError> {
    let mut ids = Vec::new();
    outbox(connection, span, |id, topic| {
        if topics.takes(&topic) {
            ids.push(MessageId::from(id));
        }
    })
    .map_err(failed)?;
    Ok(ids)
}

/// The time in the oldest id of an inbox.
pub(crate) fn inbox_begins(connection: &Connection, consumer: &Consumer) -> Result<Option<i64>, StoreError> {
    let sql = "select message_id from postroom_inbox where consumer = ?1 order by message_id limit 1";
    let oldest = connection.query_row(sql, [consumer.as_str()], |row| uuid(row, 0)).optional().map_err(failed)?;
    Ok(oldest.map(|id| id_ms(&id)))
}

/// Ids of an inbox, piece by piece.
pub(crate) fn inbox_prints(
    connection: &Connection,
    consumer: &Consumer,
    span: Span,
    piece_ms: i64,
) -> Result<IdPrints, StoreError> {
    let mut prints = IdPrints::new();
    inbox(connection, consumer, span, |id| prints.entry(id_ms(&id).div_euclid(piece_ms)).or_default().add(&id))
        .map_err(failed)?;
    Ok(prints)
}

/// Ids of an inbox.
pub(crate) fn inbox_ids(
    connection: &Connection,
    consumer: &Consumer,
    span: Span,
) -> Result<Vec<MessageId>, StoreError> {
    let mut ids = Vec::new();
    inbox(connection, consumer, span, |id| ids.push(MessageId::from(id))).map_err(failed)?;
    Ok(ids)
}

/// What a consumer has received without an effect so far.
pub(crate) fn inbox_unhandled(
    connection: &Connection,
    consumer: &Consumer,
    span: Span,
) -> Result<Unhandled, StoreError> {
    let (from, to) = span.ids();
    let count = |sql: &str| {
        let parameters: [&dyn ToSql; 3] = [&consumer.as_str(), &from.to_string(), &to.to_string()];
        connection.query_row(sql, &parameters[..], |row| row.get::<_, i64>(0)).map(i64::unsigned_abs).map_err(failed)
    };
    Ok(Unhandled {
        waiting: count(
            "select count(*) from postroom_inbox_messages m where m.consumer = ?1 and m.id >= ?2 and m.id < ?3",
        )?,
        dead: count("select count(*) from postroom_dead_consume d where d.consumer = ?1 and d.id >= ?2 and d.id < ?3")?,
    })
}

/// Which of these are dead letters of a consumer.
pub(crate) fn dead_at(
    connection: &Connection,
    consumer: &Consumer,
    ids: &[MessageId],
) -> Result<Vec<MessageId>, StoreError> {
    let dead = || -> Result<Vec<MessageId>, rusqlite::Error> {
        let sql =
            "select id from postroom_dead_consume where consumer = ?1 and id in (select value from json_each(?2))";
        let parameters = params![consumer.as_str(), serde_json::json!(ids).to_string()];
        connection.prepare(sql)?.query_map(parameters, |row| uuid(row, 0).map(MessageId::from))?.collect()
    };
    dead().map_err(failed)
}

/// Where messages are on a route.
pub(crate) fn fates(
    connection: &Connection,
    route: &str,
    ids: &[MessageId],
) -> Result<Vec<(MessageId, Fate)>, StoreError> {
    let fates = || -> Result<Vec<(MessageId, Fate)>, rusqlite::Error> {
        let sql = format!(
            "select o.id,
                          exists (select 1 from postroom_dead_letters d where d.route = ?1 and d.seq = o.seq),
                          o.seq > coalesce((select l.position_seq from postroom_lanes l where l.route = ?1), 0)
                              or exists (select 1 from postroom_parked p where p.route = ?1 and p.seq = o.seq),
                          exists (select 1 from postroom_routes r where r.name = ?1 and {TAKES})
                     from postroom_outbox o where replace(lower(o.id), '-', '') in (select value from json_each(?2))"
        );
        let ids: Vec<String> = ids.iter().map(|id| id.as_uuid().simple().to_string()).collect();
        let parameters = params![route, serde_json::json!(ids).to_string()];
        let fate = |row: &Row<'_>| {
            let fate = match (row.get(1)?, row.get(2)?, row.get(3)?) {
                (true, _, _) => Fate::Dead,
                (false, _, false) => Fate::Unrouted,
                (false, true, true) => Fate::Waiting,
                (false, false, true) => Fate::Passed,
            };
            Ok((uuid(row, 0)?.into(), fate))
        };
        connection.prepare(&sql)?.query_map(parameters, fate)?.collect()
    };
    fates().map_err(failed)
}

/// Messages by tenant and type.
pub(crate) fn tallies(
    connection: &Connection,
    route: &str,
    topics: &TopicFilter,
    span: Span,
) -> Result<Vec<Tally>, StoreError> {
    let tallies = || -> Result<Vec<Tally>, rusqlite::Error> {
        let (from, to) = span.ids();
        let sql = "select o.tenant_id, o.type, o.topic, count(*),
                          sum(d.seq is null and (p.seq is not null
                              or o.seq > coalesce((select l.position_seq from postroom_lanes l where l.route = ?3), 0))),
                          sum(d.seq is not null)
                     from postroom_outbox o
                     left join postroom_parked p on p.route = ?3 and p.seq = o.seq
                     left join postroom_dead_letters d on d.route = ?3 and d.seq = o.seq
                    where replace(lower(o.id), '-', '') >= ?1 and replace(lower(o.id), '-', '') < ?2
                    group by 1, 2, 3";
        let mut statement = connection.prepare(sql)?;
        let mut rows = statement.query([from.simple().to_string(), to.simple().to_string(), route.to_owned()])?;
        let mut found: HashMap<(Option<String>, String), Tally> = HashMap::new();
        while let Some(row) = rows.next()? {
            let (tenant, kind) = (text_or_null(row, 0)?, text(row, 1)?);
            let group = (tenant.clone(), kind.clone());
            if !topics.takes(&text(row, 2)?) || (found.len() >= GROUPS_MAX && !found.contains_key(&group)) {
                continue;
            }
            let count = |column: usize| row.get::<_, i64>(column).map(i64::unsigned_abs);
            let tally = found.entry(group).or_insert(Tally { tenant, kind, committed: 0, waiting: 0, dead: 0 });
            tally.committed += count(3)?;
            tally.waiting += count(4)?;
            tally.dead += count(5)?;
        }
        Ok(found.into_values().collect())
    };
    tallies().map_err(failed)
}

/// The application's own tables. The two parameters are milliseconds since 1970.
pub(crate) fn business(
    connection: &Connection,
    query: &str,
    span: Span,
) -> Result<Vec<(Option<String>, String, u64)>, StoreError> {
    let business = || -> Result<Vec<_>, rusqlite::Error> {
        connection.pragma_update(None, "query_only", true)?;
        let mut statement = connection.prepare(query)?;
        let change =
            |row: &Row<'_>| Ok((text_or_null(row, 0)?, text(row, 1)?, row.get::<_, i64>(2)?.max(0).unsigned_abs()));
        statement.query_map([span.from_ms, span.to_ms], change)?.collect()
    };
    business().map_err(failed)
}

/// Databases that a query finds.
pub(crate) fn discover(connection: &Connection, query: &str) -> Result<Vec<Discovered>, StoreError> {
    let found = || -> Result<Vec<Vec<Option<String>>>, rusqlite::Error> {
        connection.pragma_update(None, "query_only", true)?;
        let mut statement = connection.prepare(query)?;
        let columns = statement.column_count().min(2);
        let texts = |row: &Row<'_>| (0..columns).map(|column| text_or_null(row, column)).collect();
        statement.query_map([], texts)?.take(DISCOVERED_MAX + 1).collect()
    };
    let refused = |error: rusqlite::Error| StoreError::Refused { what: DISCOVER, source: error.into() };
    Discovered::of(found().map_err(refused)?)
}

/// Changes without a message. The parameters are those of `business`.
pub(crate) fn unwritten(
    connection: &Connection,
    query: &str,
    topics: &TopicFilter,
    changed: Span,
    written: Span,
    limit: usize,
) -> Result<Unwritten, StoreError> {
    type Versions = HashSet<(Option<String>, Option<i64>)>;
    let unwritten = || -> Result<Unwritten, rusqlite::Error> {
        connection.pragma_update(None, "query_only", true)?;
        let snapshot = connection.unchecked_transaction()?;
        let mut messages: HashMap<String, Versions> = HashMap::new();
        let (from, to) = written.ids();
        let sql = "select o.topic, o.aggregate_type, o.aggregate_id, o.aggregate_version from postroom_outbox o
                    where replace(lower(o.id), '-', '') >= ?1 and replace(lower(o.id), '-', '') < ?2 and o.aggregate_id is not null";
        let mut statement = snapshot.prepare(sql)?;
        let mut rows = statement.query([from.simple().to_string(), to.simple().to_string()])?;
        while let Some(row) = rows.next()? {
            if topics.takes(&text(row, 0)?) {
                let version: Option<i64> = row.get(3)?;
                let versions = messages.entry(text(row, 2)?).or_default();
                // As every question may be put: with type and version, or without one of them.
                for kind in [text_or_null(row, 1)?, None] {
                    versions.extend([(kind.clone(), version), (kind, None)]);
                }
            }
        }
        let mut found = Unwritten::default();
        // Ids and types may be numbers there.
        let query = query.trim().trim_end_matches(';');
        let sql = format!(
            "with c (type, id, version) as (\n{query}\n) select cast(c.type as text), cast(c.id as text), c.version from c"
        );
        let mut statement = snapshot.prepare(&sql)?;
        let mut rows = statement.query([changed.from_ms, changed.to_ms])?;
        while let Some(row) = rows.next()? {
            let change = AggregateChange {
                aggregate_type: text_or_null(row, 0)?,
                aggregate_id: text_or_null(row, 1)?.unwrap_or_default(),
                aggregate_version: row.get(2)?,
            };
            let asked = (change.aggregate_type.clone(), change.aggregate_version);
            if !messages.get(&change.aggregate_id).is_some_and(|versions| versions.contains(&asked)) {
                found.count += 1;
                if found.changes.len() < limit {
                    found.changes.push(change);
                }
            }
        }
        Ok(found)
    };
    unwritten().map_err(|error| match failed(error) {
        StoreError::Refused { source, .. } => StoreError::Refused { what: CHANGES, source },
        other => other,
    })
}

/// Keeps a result, and of each comparison the newest 100.
pub(crate) fn note(connection: &Connection, result: &Reconciled) -> Result<(), StoreError> {
    let text = serde_json::to_string(result)
        .map_err(|error| StoreError::Refused { what: "keep the result of a comparison", source: error.into() })?;
    let count = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let (missing, strangers, days) =
        (count(result.missing()), count(result.strangers()), count(result.days_that_differ()));
    let sql = format!(
        "insert or replace into postroom_reconciliations (name, at_ms, missing, strangers, days, result) values (?1, {NOW}, ?2, ?3, ?4, ?5)"
    );
    connection.execute(&sql, params![result.name, missing, strangers, days, text]).map_err(failed)?;
    let forget = "delete from postroom_reconciliations
                   where name = ?1 and at_ms < (select at_ms from postroom_reconciliations where name = ?1 order by at_ms desc limit 1 offset 99)";
    connection.execute(forget, [&result.name]).map_err(failed).map(drop)
}

/// The newest results.
pub(crate) fn reconciled(connection: &Connection, name: Option<&str>) -> Result<Vec<Reconciled>, StoreError> {
    let read = || -> Result<Vec<String>, rusqlite::Error> {
        let sql = "select r.result from postroom_reconciliations r
                    where (?1 is null or r.name = ?1)
                      and r.at_ms = (select max(n.at_ms) from postroom_reconciliations n where n.name = r.name) order by r.name";
        connection.prepare(sql)?.query_map([name], |row| row.get(0))?.collect()
    };
    let parse = |text: &String| {
        serde_json::from_str(text).map_err(|error| StoreError::Refused { what: "read a result", source: error.into() })
    };
    read().map_err(failed)?.iter().map(parse).collect()
}
