//! Tables that already exist: rows are taken into the outbox, and marked when their messages were sent. Each step is one transaction; SQLite has
//! one writer at a time, so rows enter the outbox in their order.

mod former;
mod table;
mod trial;

use std::collections::HashMap;

use postroom::{
    Deed, Done, DoneWhen, EnqueueError, Finding, FoundTable, Intake, IntakeStatus, MarkedRows, Marking, Message,
    OnRoute, Previewed, RowFate, SetAside, Setting, StoreError, TableName, TookIn, TopicFilter, crash_point,
    rows_within,
};
use rusqlite::types::Value;
use rusqlite::{Connection, Error, ErrorCode, OptionalExtension, TransactionBehavior, params, params_from_iter};

use crate::connect::{NOW, store_error};
use crate::intake::table::{Statements, Table};
use crate::operate::dead::audit;
use crate::outbox::enqueue;
use crate::text::{text, text_or_null};

pub(crate) use former::{free, indexes};

/// Where nothing in the table says that a row was taken, so many are taken at most before some of them are done: each look reads them again.
const OPEN_MAX: i64 = 10_000;
/// Rows are counted up to this.
const COUNTED: i64 = 10_000;
/// So many rows that were set aside are shown.
const ASIDE_SHOWN: i64 = 20;
const TAKE: &str = "take rows of a table; nothing was taken";

fn wrong(intake: &Intake, wrong: &[String]) -> StoreError {
    let source = format!("intake {}, table {}: {}", intake.name, intake.table, wrong.join("; ")).into();
    StoreError::Refused { what: TAKE, source }
}

fn statements(connection: &Connection, intake: &Intake) -> Result<Statements, StoreError> {
    let read = Table::read(connection, intake).map_err(|error| store_error("look at a table", error))?;
    let table = read.ok_or_else(|| wrong(intake, &["there is no such table".to_owned()]))?;
    Statements::of(intake, table).map_err(|what| wrong(intake, &what))
}

fn run(connection: &Connection, (sql, values): (String, Vec<Value>)) -> Result<usize, Error> {
    connection.prepare_cached(&sql)?.execute(params_from_iter(values))
}

fn now_us(connection: &Connection) -> Result<i64, Error> {
    connection.query_row(&format!("select {NOW} * 1000"), [], |row| row.get(0))
}

pub(crate) fn take_in(connection: &mut Connection, intake: &Intake, max: usize) -> Result<TookIn, StoreError> {
    let failed = |error| store_error(TAKE, error);
    let statements = statements(connection, intake)?;
    let mut max = i64::try_from(max).unwrap_or(i64::MAX);
    if intake.done == DoneWhen::Sent && intake.taken.is_empty() {
        let sql =
            "select count(*) from (select 1 from postroom_intake_rows where intake = ?1 and state = 'taken' limit ?2)";
        let open: i64 = connection.query_row(sql, params![intake.name, OPEN_MAX], |row| row.get(0)).map_err(failed)?;
        max = max.min(OPEN_MAX - open);
        if max <= 0 {
            return Ok(TookIn::default());
        }
    }
    // Without the lock of writers, as long as there is nothing to do.
    let sizes = |connection: &Connection| -> Result<Vec<i64>, Error> {
        let (sql, values) = statements.next_sizes(&intake.name, max);
        connection.prepare_cached(&sql)?.query_map(params_from_iter(values), |row| row.get(1))?.collect()
    };
    if sizes(connection).map_err(failed)?.is_empty() {
        return Ok(TookIn::default());
    }
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let found = sizes(&tx).map_err(failed)?;
    let at_once = rows_within(found.iter().copied());
    let more = found.len() as i64 >= max || at_once < found.len();
    let (sql, values) = statements.next(&intake.name, at_once as i64);
    let rows: Vec<_> = {
        let mut statement = tx.prepare(&sql).map_err(failed)?;
        let rows = statement.query_map(params_from_iter(values), |row| statements.whole(row)).map_err(failed)?;
        rows.collect::<Result<_, _>>().map_err(failed)?
    };
    let now = now_us(&tx).map_err(failed)?;
    let mut took = TookIn { more, ..TookIn::default() };
    for row in rows {
        match intake.message.message(&intake.table, &row, now) {
            Err(error) => {
                set_aside(&tx, intake, &statements, (&row.row, None), &error).map_err(failed)?;
                took.refused += 1;
            }
            Ok(message) if is_known(&tx, &message).map_err(failed)? => {
                let id = message.id.to_string();
                let error = format!(
                    "a message with the id {id} is already in the outbox; `postroom why {id}` tells where it is, `postroom replay --id {id}` sends it again"
                );
                set_aside(&tx, intake, &statements, (&row.row, Some(&id)), &error).map_err(failed)?;
                took.refused += 1;
            }
            Ok(message) => {
                tx.execute_batch("savepoint postroom_row").map_err(failed)?;
                match taken(&tx, intake, &statements, &row.row, &message) {
                    Ok(()) => took.taken += 1,
                    Err(error) if is_of_row(&error) => {
                        tx.execute_batch("rollback to postroom_row").map_err(failed)?;
                        let error = format!("the row cannot be marked as taken: {error}");
                        set_aside(&tx, intake, &statements, (&row.row, None), &error).map_err(failed)?;
                        took.refused += 1;
                    }
                    Err(error) => return Err(failed(error)),
                }
                tx.execute_batch("release postroom_row").map_err(failed)?;
            }
        }
    }
    crash_point("intake-before-commit");
    tx.commit().map_err(failed)?;
    crash_point("intake-after-commit");
    Ok(took)
}

fn is_known(connection: &Connection, message: &Message) -> Result<bool, Error> {
    let sql = "select 1 from postroom_outbox where replace(lower(id), '-', '') = ?1";
    let id = message.id.to_string().replace('-', "");
    Ok(connection.prepare_cached(sql)?.query_row([id], |_| Ok(())).optional()?.is_some())
}

fn taken(
    connection: &Connection,
    intake: &Intake,
    statements: &Statements,
    row: &str,
    message: &Message,
) -> Result<(), Error> {
    enqueue(connection, std::slice::from_ref(message)).map_err(|error| match error {
        EnqueueError::Store(source) => match source.downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::ToSqlConversionFailure(source),
        },
        other => Error::ToSqlConversionFailure(other.into()),
    })?;
    let seq = connection.last_insert_rowid();
    if intake.done == DoneWhen::Taken {
        return finish(connection, statements, &intake.sent, row);
    }
    let sql = "insert into postroom_intake_rows (intake, row_key, id, seq, state) values (?1, ?2, ?3, ?4, 'taken')";
    connection.prepare_cached(sql)?.execute(params![intake.name, row, message.id.to_string(), seq])?;
    set(connection, statements, &intake.taken, row, None)
}

fn set_aside(
    connection: &Connection,
    intake: &Intake,
    statements: &Statements,
    (row, id): (&str, Option<&str>),
    error: &str,
) -> Result<(), Error> {
    let sql = "insert into postroom_intake_rows (intake, row_key, id, state, error) values (?1, ?2, ?3, 'refused', ?4)";
    connection.prepare_cached(sql)?.execute(params![intake.name, row, id, error])?;
    // One that refuses stays as it is.
    tried(connection, || set(connection, statements, &intake.dead, row, Some(error))).map(drop)
}

/// The row is at fault, and not the table: a constraint, a trigger, a value.
fn is_of_row(error: &Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch | ErrorCode::TooBig)
    )
}

/// Runs what may fail because of a row; then nothing of it stays. The reason, if it failed.
fn tried(connection: &Connection, work: impl FnOnce() -> Result<(), Error>) -> Result<Result<(), String>, Error> {
    connection.execute_batch("savepoint postroom_tried")?;
    let done = match work() {
        Ok(()) => Ok(()),
        Err(error) if is_of_row(&error) => {
            connection.execute_batch("rollback to postroom_tried")?;
            Err(error.to_string())
        }
        Err(error) => return Err(error),
    };
    connection.execute_batch("release postroom_tried")?;
    Ok(done)
}

fn set(
    connection: &Connection,
    statements: &Statements,
    settings: &[(String, Setting)],
    row: &str,
    error: Option<&str>,
) -> Result<(), Error> {
    match settings.is_empty() {
        true => Ok(()),
        false => run(connection, statements.set(settings, row, error)).map(drop),
    }
}

fn finish(connection: &Connection, statements: &Statements, done: &Done, row: &str) -> Result<(), Error> {
    match done {
        Done::Set(settings) => set(connection, statements, settings, row, None),
        Done::Delete => run(connection, statements.delete(row)).map(drop),
    }
}

pub(crate) fn mark_rows(
    connection: &mut Connection,
    intake: &Intake,
    after: i64,
    max: usize,
) -> Result<MarkedRows, StoreError> {
    let failed = |error| store_error("mark rows that were sent", error);
    let statements = statements(connection, intake)?;
    let read = |connection: &Connection| -> Result<(Marking, Option<i64>), Error> {
        let taken = fates(connection, intake, after, max)?;
        let next = taken.last().map(|(place, ..)| *place).filter(|_| taken.len() >= max);
        let mut marking = Marking::default();
        taken.into_iter().for_each(|(_, row, was_dead, fate)| marking.note(row, was_dead, fate));
        Ok((marking, next))
    };
    // Without the lock of writers, as long as there is nothing to write.
    let (marking, next) = read(connection).map_err(failed)?;
    if marking == Marking::default() {
        return Ok(MarkedRows { next, ..MarkedRows::default() });
    }
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let (mut marking, next) = read(&tx).map_err(failed)?;
    let mut write = || -> Result<(), Error> {
        for row in marking.sent.clone() {
            if let Err(told) = tried(&tx, || finish(&tx, &statements, &intake.sent, &row))? {
                marking.unmarked(&row, &told);
                continue;
            }
            let sql = "delete from postroom_intake_rows where intake = ?1 and row_key = ?2";
            tx.prepare_cached(sql)?.execute(params![intake.name, row])?;
        }
        for (row, error) in &marking.dead {
            let _ = tried(&tx, || set(&tx, &statements, &intake.dead, row, Some(error)))?;
        }
        for (row, state, error) in &marking.changed {
            let sql = "update postroom_intake_rows set state = ?3, error = ?4 where intake = ?1 and row_key = ?2";
            tx.prepare_cached(sql)?.execute(params![intake.name, row, state, error])?;
        }
        Ok(())
    };
    write().map_err(failed)?;
    tx.commit().map_err(failed)?;
    Ok(MarkedRows {
        sent: marking.sent.len() as u64,
        dead: marking.dead.len() as u64,
        unclear: marking.unclear(),
        unmarked: marking.unmarked_count(),
        next,
        others: false,
    })
}

/// A route: how far it is, its topics, and until when it did not take which.
struct Known {
    name: String,
    position: i64,
    topics: TopicFilter,
    former: Vec<(TopicFilter, i64)>,
}

fn filter_of(json: &str) -> Option<TopicFilter> {
    TopicFilter::new(serde_json::from_str::<Vec<String>>(json).ok()?).ok()
}

fn routes(connection: &Connection) -> Result<Vec<Known>, Error> {
    let mut statement = connection.prepare(
        "select r.name, l.position_seq, r.topics from postroom_routes r join postroom_lanes l on l.route = r.name",
    )?;
    let rows: Vec<(String, i64, String)> =
        statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?.collect::<Result<_, _>>()?;
    let mut statement = connection.prepare(
        "select v.topics, n.set_ms from postroom_route_revisions v
           join postroom_route_revisions n on n.route = v.route and n.revision = v.revision + 1 where v.route = ?1",
    )?;
    rows.into_iter()
        .map(|(name, position, topics)| {
            let former: Vec<(String, i64)> =
                statement.query_map([&name], |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<Result<_, _>>()?;
            let former = former.into_iter().filter_map(|(topics, until)| Some((filter_of(&topics)?, until))).collect();
            // What cannot be read takes everything rather than pass a message by.
            Ok(Known { name, position, topics: filter_of(&topics).unwrap_or_else(TopicFilter::all), former })
        })
        .collect()
}

/// Place, row, whether its message is known to be dead, and what became of it.
fn fates(
    connection: &Connection,
    intake: &Intake,
    after: i64,
    max: usize,
) -> Result<Vec<(i64, String, bool, RowFate)>, Error> {
    let routes = routes(connection)?;
    let discarded: HashMap<String, String> = {
        let mut statement = connection.prepare(
            "select replace(lower(i.value), '-', ''), a.actor || ': ' || a.reason from postroom_audit a, json_each(a.message_ids) i
              where a.action in ('dead.discard', 'dead.expire')
                and a.at_ms >= (select min(r.at_ms) from postroom_intake_rows r where r.intake = ?1 and r.state in ('taken', 'dead'))",
        )?;
        statement.query_map([&intake.name], |row| Ok((text(row, 0)?, text(row, 1)?)))?.collect::<Result<_, _>>()?
    };
    let mut of_route = connection.prepare(
        "select exists (select 1 from postroom_parked p where p.route = ?1 and p.seq = ?2 and replace(lower(p.id), '-', '') = ?3),
                (select d.error from postroom_dead_letters d where d.route = ?1 and d.seq = ?2 and replace(lower(d.id), '-', '') = ?3)",
    )?;
    let mut statement = connection.prepare(
        "select b.place, b.row_key, replace(b.id, '-', ''), b.state, b.at_ms, b.seq, o.topic
           from postroom_intake_rows b left join postroom_outbox o on o.seq = b.seq and replace(lower(o.id), '-', '') = replace(b.id, '-', '')
          where b.intake = ?1 and b.state in ('taken', 'dead') and b.place > ?2 order by b.place limit ?3",
    )?;
    let mut rows = statement.query(params![intake.name, after, max as i64])?;
    let mut fates = Vec::new();
    while let Some(row) = rows.next()? {
        let (id, at_ms, seq): (String, i64, i64) = (row.get(2)?, row.get(4)?, row.get(5)?);
        let topic = text_or_null(row, 6)?;
        let mut on = Vec::new();
        for route in &routes {
            let waits = |row: &rusqlite::Row<'_>| Ok((row.get::<_, bool>(0)?, text_or_null(row, 1)?));
            let (parked, dead) = of_route.query_row(params![route.name, seq, id], waits)?;
            // One that waits or is dead is the route's, whatever it takes now.
            if parked || dead.is_some() || topic.as_deref().is_some_and(|topic| route.topics.takes(topic)) {
                let lacked =
                    |topic: &str| route.former.iter().any(|(topics, until)| *until >= at_ms && !topics.takes(topic));
                let unsure = topic.as_deref().is_some_and(lacked);
                on.push(OnRoute { passed: seq <= route.position, parked, dead, unsure });
            }
        }
        let fate = match RowFate::of(topic.is_some(), &on, discarded.get(&id).cloned()) {
            // Its copy waits, though the outbox has it no more.
            RowFate::Unclear if on.iter().any(|route| route.parked) => RowFate::Waits,
            fate => fate,
        };
        fates.push((row.get(0)?, text(row, 1)?, row.get::<_, String>(3)? == "dead", fate));
    }
    Ok(fates)
}

pub(crate) fn preview(connection: &Connection, intake: &Intake, max: usize) -> Result<Vec<Previewed>, StoreError> {
    let failed = |error| store_error("look at rows of a table", error);
    let statements = statements(connection, intake)?;
    let (sql, values) = statements.next(&intake.name, i64::try_from(max).unwrap_or(i64::MAX));
    let now = now_us(connection).map_err(failed)?;
    let mut statement = connection.prepare(&sql).map_err(failed)?;
    let rows = statement.query_map(params_from_iter(values), |row| {
        let row = statements.whole(row)?;
        Ok(Previewed { message: intake.message.message(&intake.table, &row, now), row: row.row })
    });
    rows.and_then(Iterator::collect).map_err(failed)
}

pub(crate) fn status(connection: &Connection, intake: &Intake) -> Result<IntakeStatus, StoreError> {
    let failed = |error| store_error("look at an intake", error);
    let statements = statements(connection, intake)?;
    let time = intake.message.occurred_at.as_ref().and_then(|template| template.sole_column());
    let (sql, values) = statements.count(&intake.name, time, COUNTED);
    let (pending, oldest): (i64, Option<i64>) =
        connection.query_row(&sql, params_from_iter(values), |row| Ok((row.get(0)?, row.get(1)?))).map_err(failed)?;
    let now = now_us(connection).map_err(failed)?;
    let mut status = IntakeStatus {
        pending,
        pending_is_bound: pending >= COUNTED,
        oldest_seconds: oldest.map(|us| (now.saturating_sub(us)) as f64 / 1e6),
        ..IntakeStatus::default()
    };
    if !statements.table.tracked {
        return Ok(status);
    }
    let mut read = || -> Result<(), Error> {
        let sql = "select count(*) filter (where state in ('taken', 'dead')), count(*) filter (where state = 'dead'),
                          count(*) filter (where state = 'refused'), count(*) filter (where state = 'unclear'),
                          count(*) filter (where state = 'unmarked')
                     from postroom_intake_rows where intake = ?1";
        let counts = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?));
        (status.taken, status.dead, status.refused, status.unclear, status.unmarked) =
            connection.query_row(sql, [&intake.name], counts)?;
        let sql = format!(
            "select row_key, state, id, coalesce(error, ''), ({NOW} - at_ms) / 1000.0 from postroom_intake_rows
              where intake = ?1 and state in ('refused', 'unclear', 'unmarked') order by place desc limit ?2"
        );
        let aside = |row: &rusqlite::Row<'_>| {
            Ok(SetAside {
                row: text(row, 0)?,
                state: row.get(1)?,
                id: row.get(2)?,
                error: text(row, 3)?,
                age_seconds: row.get(4)?,
            })
        };
        let mut statement = connection.prepare(&sql)?;
        status.set_aside = statement.query_map(params![intake.name, ASIDE_SHOWN], aside)?.collect::<Result<_, _>>()?;
        Ok(())
    };
    read().map_err(failed)?;
    Ok(status)
}

pub(crate) fn again(
    connection: &mut Connection,
    intake: &Intake,
    row: Option<&str>,
    deed: &Deed,
) -> Result<u64, StoreError> {
    let failed = |error| store_error("let rows be taken again; nothing was changed", error);
    let statements = statements(connection, intake)?;
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let sql = "update postroom_intake_rows set state = 'taken', error = null
                where intake = ?1 and (row_key = ?2 or ?2 is null) and state = 'unmarked'";
    let unmarked = tx.execute(sql, params![intake.name, row]).map_err(failed)? as u64;
    let sql = "delete from postroom_intake_rows
                where intake = ?1 and (row_key = ?2 or (?2 is null and state = 'refused')) and state in ('refused', 'unclear', 'discarded')
               returning row_key, id";
    let gone: Vec<(String, Option<String>)> = {
        let mut statement = tx.prepare(sql).map_err(failed)?;
        let read = |row: &rusqlite::Row<'_>| Ok((text(row, 0)?, text_or_null(row, 1)?));
        let rows = statement.query_map(params![intake.name, row], read).map_err(failed)?;
        rows.collect::<Result<_, _>>().map_err(failed)?
    };
    let back: Vec<(String, Setting)> =
        intake.pending.iter().filter_map(|(name, values)| Some((name.clone(), values.first()?.setting()?))).collect();
    for (key, _) in &gone {
        set(&tx, &statements, &back, key, None).map_err(failed)?;
    }
    if unmarked > 0 || !gone.is_empty() {
        let keys: Vec<&str> = gone.iter().map(|(key, _)| key.as_str()).collect();
        let ids: Vec<&str> = gone.iter().filter_map(|(_, id)| id.as_deref()).collect();
        let filter = serde_json::json!({ "intake": intake.name, "rows": keys }).to_string();
        audit(&tx, deed, "intake.again", &filter, &ids).map_err(failed)?;
    }
    tx.commit().map_err(failed)?;
    Ok(gone.len() as u64 + unmarked)
}

pub(crate) fn check(connection: &mut Connection, intake: &Intake) -> Result<Vec<Finding>, StoreError> {
    let failed = |error| store_error("look at a table", error);
    let named = format!("intake {}, table {}", intake.name, intake.table);
    let Some(table) = Table::read(connection, intake).map_err(failed)? else {
        let advice = "name a table of the file; postroom's tables and the application's are in one file";
        return Ok(vec![Finding::bad(format!("{named}: there is no such table"), advice)]);
    };
    if table.kind != "table" {
        let advice = "name the table that applications write to: rows of a view cannot be marked";
        return Ok(vec![Finding::bad(format!("{named}: that is not a table"), advice)]);
    }
    let advice = "change [[intake]] in the configuration";
    let statements = match Statements::of(intake, table) {
        Ok(statements) => statements,
        Err(wrong) => {
            return Ok(wrong.into_iter().map(|what| Finding::bad(format!("{named}: {what}"), advice)).collect());
        }
    };
    let settings = |done: &Done| if let Done::Set(settings) = done { settings.clone() } else { Vec::new() };
    let mut tried = vec![("pending", statements.next(&intake.name, 1).0)];
    for (place, settings) in
        [("taken", intake.taken.clone()), ("sent", settings(&intake.sent)), ("dead", intake.dead.clone())]
    {
        if !settings.is_empty() {
            tried.push((place, statements.set(&settings, "", None).0));
        }
    }
    for (place, sql) in tried {
        if let Err(error) = connection.prepare(&sql) {
            return Ok(vec![Finding::bad(format!("{named}: {place}: {error}"), advice)]);
        }
    }
    if let Some(bad) = trial::tried(connection, intake, &statements, &named).map_err(failed)? {
        return Ok(vec![bad]);
    }
    let mut findings = vec![Finding::good(format!("{named}: its columns and statements fit"))];
    let sql = "select s.sql not like '%autoincrement%' from sqlite_schema s where s.name = ?1 and s.type = 'table'";
    let counts_again: bool = connection.query_row(sql, [&intake.table.name], |row| row.get(0)).map_err(failed)?;
    if intake.sent == Done::Delete && counts_again && statements.row.type_name == "INTEGER" {
        let found = format!(
            "{named}: SQLite gives the number of a deleted row to a new one, which is then taken for the old one"
        );
        let advice = "declare the column as integer primary key autoincrement, or map a time as occurred_at";
        findings.push(Finding::bad(found, advice));
    }
    if let Some(why) = intake.without_index(&statements.table.shape, &statements.row) {
        let advice = "create an index on the columns of `pending` and `order`";
        findings.push(Finding::bad(format!("{named}: {why}"), advice));
    }
    Ok(findings)
}

pub(crate) fn tables_with(connection: &Connection, columns: &[String]) -> Result<Vec<FoundTable>, StoreError> {
    let failed = |error| store_error("look for tables", error);
    let read = || -> Result<Vec<FoundTable>, Error> {
        let sql = "select s.name, c.name, c.type from sqlite_schema s, pragma_table_xinfo(s.name) c
                    where s.type = 'table' and s.name not like 'postroom\\_%' escape '\\' and s.name not like 'sqlite\\_%' escape '\\'
                    order by s.name, c.cid";
        let mut statement = connection.prepare(sql)?;
        let rows: Vec<(String, String, String)> =
            statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?.collect::<Result<_, _>>()?;
        let mut tables: Vec<FoundTable> = Vec::new();
        for (name, column, kind) in rows {
            let table = TableName { schema: None, name };
            match tables.last_mut() {
                Some(last) if last.table == table => last.columns.push((column, kind)),
                _ => tables.push(FoundTable { table, columns: vec![(column, kind)] }),
            }
        }
        tables.retain(|table| columns.iter().all(|wanted| table.columns.iter().any(|(name, _)| name == wanted)));
        Ok(tables)
    };
    read().map_err(failed)
}
