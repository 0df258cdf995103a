//! Tables that already exist: rows are taken into the outbox, and marked when their messages were sent. Each step is one transaction under
//! the lock of the intake's own row, so that one process at a time takes and rows enter the outbox in their order.

mod fates;
mod former;
mod table;
mod trial;

use std::collections::{HashMap, HashSet};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Params, Row, Transaction, Value};
use postroom::{
    Deed, Done, DoneWhen, EnqueueError, Finding, FoundTable, Intake, IntakeRow, IntakeStatus, MarkedRows, Marking,
    Message, Outbox, Previewed, Searched, SetAside, Setting, StoreError, TableName, TookIn, crash_point,
};

use crate::Mysql;
use crate::desk::{Failed, begin};
use crate::intake::table::{Statements, Table};
use crate::log::{get, json};
use crate::operate::audit::audit;

pub(crate) use former::{free, indexes, senders};

/// Where nothing in the table says that a row was taken, so many are taken at most before some of them are done: each look reads them again.
const OPEN_MAX: i64 = 10_000;
/// Rows are counted up to this.
const COUNTED: i64 = 10_000;
/// So many rows that were set aside are shown.
const ASIDE_SHOWN: i64 = 20;
/// Values of one statement.
const CHUNK: usize = 500;

fn wrong(intake: &Intake, wrong: &[String]) -> Failed {
    let source = format!("intake {}, table {}: {}", intake.name, intake.table, wrong.join("; ")).into();
    StoreError::Refused { what: "take rows of a table; nothing was taken", source }.into()
}

async fn statements(conn: &mut Conn, intake: &Intake) -> Result<Statements, Failed> {
    let table =
        Table::read(conn, intake).await?.ok_or_else(|| wrong(intake, &["there is no such table".to_owned()]))?;
    Statements::of(intake, table).map_err(|what| wrong(intake, &what))
}

/// Registers the intake and locks its row. False: another process has it.
async fn turn(tx: &mut Transaction<'_>, intake: &Intake) -> Result<bool, Error> {
    let sql = "select 1 from postroom_intakes where name = ? for update skip locked";
    Ok(tx.exec_first::<i64, _, _>(sql, (&intake.name,)).await?.is_some())
}

async fn register(conn: &mut Conn, intake: &Intake) -> Result<(), Error> {
    let known: Option<i64> = conn.exec_first("select 1 from postroom_intakes where name = ?", (&intake.name,)).await?;
    match known {
        Some(_) => Ok(()),
        None => conn.exec_drop("insert ignore into postroom_intakes (name) values (?)", (&intake.name,)).await,
    }
}

async fn rows(tx: &mut impl Queryable, (sql, values): (String, Vec<Value>)) -> Result<Vec<Row>, Error> {
    tx.exec(sql, Params::Positional(values)).await
}

async fn drop_rows(tx: &mut impl Queryable, (sql, values): (String, Vec<Value>)) -> Result<(), Error> {
    tx.exec_drop(sql, Params::Positional(values)).await
}

async fn now_us(conn: &mut impl Queryable) -> Result<i64, Error> {
    let sql = "select timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))";
    Ok(conn.query_first(sql).await?.unwrap_or_default())
}

/// The row is at fault, and not the table or our rights: a constraint, a trigger, a value.
fn of_row(error: &Error) -> Option<String> {
    let Error::Server(told) = error else { return None };
    let values = [1264, 1265, 1292, 1366, 1406, 3140, 3819, 4025];
    let by_row = ["22", "23", "45"].iter().any(|class| told.state.starts_with(class)) || values.contains(&told.code);
    by_row.then(|| told.message.clone())
}

/// Runs what may fail because of a row; then nothing of it stays. The reason, if it failed.
async fn tried<T>(
    tx: &mut Transaction<'_>,
    work: impl AsyncFnOnce(&mut Transaction<'_>) -> Result<T, Error>,
) -> Result<Result<T, String>, Error> {
    tx.query_drop("savepoint postroom_rows").await?;
    match work(tx).await {
        Ok(value) => Ok(Ok(value)),
        Err(error) => match of_row(&error) {
            Some(told) => {
                tx.query_drop("rollback to savepoint postroom_rows").await?;
                Ok(Err(told))
            }
            None => Err(error),
        },
    }
}

/// What a row that is set aside is set aside for.
struct Refused {
    row: String,
    id: Option<String>,
    error: String,
}

pub(crate) async fn take_in(conn: &mut Conn, intake: &Intake, mut max: usize) -> Result<TookIn, Failed> {
    let statements = statements(conn, intake).await?;
    register(conn, intake).await?;
    let mut tx = begin(conn).await?;
    if !turn(&mut tx, intake).await? {
        return Ok(TookIn { others: true, ..TookIn::default() });
    }
    if intake.done == DoneWhen::Sent && intake.taken.is_empty() {
        let sql =
            "select count(*) from (select 1 from postroom_intake_rows where intake = ? and state = 'taken' limit ?) c";
        let open: i64 = tx.exec_first(sql, (&intake.name, OPEN_MAX)).await?.unwrap_or_default();
        max = max.min(usize::try_from(OPEN_MAX - open).unwrap_or_default());
        if max == 0 {
            return Ok(TookIn::default());
        }
    }
    let mut search = intake.search(max);
    while let Some(many) = search.reads() {
        let many = i64::try_from(many).unwrap_or(i64::MAX);
        let next = rows(&mut tx, statements.next_keys(&intake.name, many)).await?;
        search.read(next.into_iter().map(|row| statements.keys_of(row)).collect::<Result<_, _>>()?);
        while let Some(chunk) = search.locks() {
            let free = rows(&mut tx, statements.free(&chunk)).await?;
            search.locked(&chunk, free.iter().map(|row| statements.whole(row)).collect());
        }
    }
    let Searched { whole, held, more } = search.end();
    if whole.is_empty() {
        return Ok(TookIn { held, ..TookIn::default() });
    }
    let now = now_us(&mut tx).await?;
    let (mut messages, mut refused): (Vec<(String, Message)>, Vec<Refused>) = (Vec::new(), Vec::new());
    for row in whole {
        match intake.message.message(&intake.table, &row, now) {
            Ok(message) => messages.push((row.row, message)),
            Err(error) => refused.push(Refused { row: row.row, id: None, error }),
        }
    }
    refuse_known(&mut tx, &mut messages, &mut refused).await?;
    let taken = write(&mut tx, intake, &statements, messages, &mut refused).await?;
    set_aside(&mut tx, intake, &statements, &refused).await?;
    crash_point("intake-before-commit");
    tx.commit().await?;
    crash_point("intake-after-commit");
    Ok(TookIn { taken, refused: refused.len() as u64, held, more, others: false })
}

/// Sets messages aside whose id is in the outbox, or among those before them: the same message, written twice.
async fn refuse_known(
    tx: &mut Transaction<'_>,
    messages: &mut Vec<(String, Message)>,
    refused: &mut Vec<Refused>,
) -> Result<(), Error> {
    let mut known: HashSet<String> = HashSet::new();
    for chunk in messages.chunks(CHUNK) {
        let sql = format!("select id from postroom_outbox where id in ({})", marks(chunk.len(), "?"));
        let ids: Vec<Value> = chunk.iter().map(|(_, message)| message.id.to_string().into()).collect();
        known.extend(tx.exec::<String, _, _>(sql, Params::Positional(ids)).await?);
    }
    messages.retain(|(row, message)| {
        let id = message.id.to_string();
        let is_new = known.insert(id.clone());
        if !is_new {
            let error = format!(
                "a message with the id {id} is already in the outbox; `postroom why {id}` tells where it is, `postroom replay --id {id}` sends it again"
            );
            refused.push(Refused { row: row.clone(), id: Some(id), error });
        }
        is_new
    });
    Ok(())
}

fn marks(count: usize, one: &str) -> String {
    vec![one; count].join(", ")
}

async fn note_taken(
    tx: &mut Transaction<'_>,
    intake: &Intake,
    keys: &[String],
    messages: &[Message],
) -> Result<(), Error> {
    for (keys, messages) in keys.chunks(CHUNK).zip(messages.chunks(CHUNK)) {
        let sql = format!("select id, seq from postroom_outbox where id in ({})", marks(messages.len(), "?"));
        let ids: Vec<Value> = messages.iter().map(|message| message.id.to_string().into()).collect();
        let seqs: HashMap<String, i64> =
            tx.exec::<(String, i64), _, _>(sql, Params::Positional(ids)).await?.into_iter().collect();
        let sql = format!(
            "insert into postroom_intake_rows (intake, row_key, id, seq, state) values {}",
            marks(keys.len(), "(?, ?, ?, ?, 'taken')")
        );
        let values = keys.iter().zip(messages).flat_map(|(key, message)| {
            let id = message.id.to_string();
            let seq = seqs.get(&id).copied();
            [intake.name.as_str().into(), key.as_str().into(), id.into(), seq.into()]
        });
        tx.exec_drop(sql, Params::Positional(values.collect())).await?;
    }
    Ok(())
}

/// Writes the messages and marks their rows: all at once, or one by one if one of them cannot be; that one is set aside. Returns how many.
async fn write(
    tx: &mut Transaction<'_>,
    intake: &Intake,
    statements: &Statements,
    messages: Vec<(String, Message)>,
    refused: &mut Vec<Refused>,
) -> Result<u64, Error> {
    let count = messages.len();
    let (keys, messages): (Vec<String>, Vec<Message>) = messages.into_iter().unzip();
    let all = async |tx: &mut Transaction<'_>| write_at_once(tx, intake, statements, &keys, &messages).await;
    if tried(tx, all).await?.is_ok() {
        return Ok(count as u64);
    }
    let mut taken = 0;
    for (key, message) in keys.iter().zip(&messages) {
        let (keys, messages) = (std::slice::from_ref(key), std::slice::from_ref(message));
        let one = async |tx: &mut Transaction<'_>| write_at_once(tx, intake, statements, keys, messages).await;
        match tried(tx, one).await? {
            Ok(()) => taken += 1,
            Err(told) => {
                let error = format!("the row cannot be marked as taken: {told}");
                refused.push(Refused { row: key.clone(), id: None, error });
            }
        }
    }
    Ok(taken)
}

async fn write_at_once(
    tx: &mut Transaction<'_>,
    intake: &Intake,
    statements: &Statements,
    keys: &[String],
    messages: &[Message],
) -> Result<(), Error> {
    Mysql.enqueue(tx, messages).await.map_err(|error| match error {
        EnqueueError::Store(source) => match source.downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::Other(source),
        },
        other => Error::Other(other.into()),
    })?;
    match intake.done {
        DoneWhen::Sent => {
            note_taken(tx, intake, keys, messages).await?;
            set(tx, statements, &intake.taken, keys).await
        }
        DoneWhen::Taken => finish(tx, statements, &intake.sent, keys).await,
    }
}

async fn set_aside(
    tx: &mut Transaction<'_>,
    intake: &Intake,
    statements: &Statements,
    refused: &[Refused],
) -> Result<(), Error> {
    for Refused { row, id, error } in refused {
        let sql = "insert into postroom_intake_rows (intake, row_key, id, state, error) values (?, ?, ?, 'refused', ?)";
        tx.exec_drop(sql, (&intake.name, row, id, error)).await?;
        // One that refuses stays as it is.
        let mark = async |tx: &mut Transaction<'_>| set_error(tx, statements, &intake.dead, row, error).await;
        let _ = tried(tx, mark).await?;
    }
    Ok(())
}

/// Marks rows as sent: all at once, or one by one if one of them refuses.
async fn finish_where_possible(
    tx: &mut Transaction<'_>,
    statements: &Statements,
    done: &Done,
    marking: &mut Marking,
) -> Result<(), Error> {
    let all = marking.sent.clone();
    let at_once = async |tx: &mut Transaction<'_>| finish(tx, statements, done, &all).await;
    if tried(tx, at_once).await?.is_ok() {
        return Ok(());
    }
    for row in &all {
        let one = async |tx: &mut Transaction<'_>| finish(tx, statements, done, std::slice::from_ref(row)).await;
        if let Err(told) = tried(tx, one).await? {
            marking.unmarked(row, &told);
        }
    }
    Ok(())
}

async fn set_error(
    tx: &mut Transaction<'_>,
    statements: &Statements,
    settings: &[(String, Setting)],
    row: &String,
    error: &str,
) -> Result<(), Error> {
    if settings.is_empty() {
        return Ok(());
    }
    drop_rows(tx, statements.set(settings, std::slice::from_ref(row), Some(error))).await
}

async fn set(
    tx: &mut Transaction<'_>,
    statements: &Statements,
    settings: &[(String, Setting)],
    keys: &[String],
) -> Result<(), Error> {
    for keys in keys.chunks(CHUNK).filter(|_| !settings.is_empty()) {
        drop_rows(tx, statements.set(settings, keys, None)).await?;
    }
    Ok(())
}

async fn finish(tx: &mut Transaction<'_>, statements: &Statements, done: &Done, keys: &[String]) -> Result<(), Error> {
    match done {
        Done::Set(settings) => set(tx, statements, settings, keys).await,
        Done::Delete => {
            for keys in keys.chunks(CHUNK) {
                drop_rows(tx, statements.delete(keys)).await?;
            }
            Ok(())
        }
    }
}

pub(crate) async fn mark_rows(conn: &mut Conn, intake: &Intake, after: i64, max: usize) -> Result<MarkedRows, Failed> {
    let statements = statements(conn, intake).await?;
    register(conn, intake).await?;
    let mut tx = begin(conn).await?;
    if !turn(&mut tx, intake).await? {
        return Ok(MarkedRows { others: true, ..MarkedRows::default() });
    }
    let taken = fates::of(&mut tx, intake, after, max).await?;
    let next = taken.last().map(|taken| taken.place).filter(|_| taken.len() >= max);
    let mut marking = Marking::default();
    for taken in taken {
        marking.note(taken.row, taken.was_dead, taken.fate);
    }
    finish_where_possible(&mut tx, &statements, &intake.sent, &mut marking).await?;
    for keys in marking.sent.chunks(CHUNK) {
        let sql =
            format!("delete from postroom_intake_rows where intake = ? and row_key in ({})", marks(keys.len(), "?"));
        let keys = keys.iter().map(|key| Value::from(key.as_str()));
        let values = std::iter::once(intake.name.as_str().into()).chain(keys).collect();
        tx.exec_drop(sql, Params::Positional(values)).await?;
    }
    for (row, error) in &marking.dead {
        let mark = async |tx: &mut Transaction<'_>| set_error(tx, &statements, &intake.dead, row, error).await;
        let _ = tried(&mut tx, mark).await?;
    }
    for (row, state, error) in &marking.changed {
        let sql = "update postroom_intake_rows set state = ?, error = ? where intake = ? and row_key = ?";
        tx.exec_drop(sql, (state, error, &intake.name, row)).await?;
    }
    tx.commit().await?;
    Ok(MarkedRows {
        sent: marking.sent.len() as u64,
        dead: marking.dead.len() as u64,
        unclear: marking.unclear(),
        unmarked: marking.unmarked_count(),
        next,
        others: false,
    })
}

pub(crate) async fn preview(conn: &mut Conn, intake: &Intake, max: usize) -> Result<Vec<Previewed>, Failed> {
    let statements = statements(conn, intake).await?;
    let found = rows(conn, statements.next(&intake.name, i64::try_from(max).unwrap_or(i64::MAX))).await?;
    let now = now_us(conn).await?;
    let previewed = found.iter().map(|row| {
        let row = statements.whole(row);
        Previewed { message: intake.message.message(&intake.table, &row, now), row: row.row }
    });
    Ok(previewed.collect())
}

pub(crate) async fn status(conn: &mut Conn, intake: &Intake) -> Result<IntakeStatus, Failed> {
    let statements = statements(conn, intake).await?;
    let time = intake.message.occurred_at.as_ref().and_then(|template| template.sole_column());
    let (sql, values) = statements.count(&intake.name, time, COUNTED);
    let (pending, oldest): (i64, Option<i64>) =
        conn.exec_first(sql, Params::Positional(values)).await?.unwrap_or_default();
    let now = now_us(conn).await?;
    let mut status = IntakeStatus {
        pending,
        pending_is_bound: pending >= COUNTED,
        oldest_seconds: oldest.map(|us| (now.saturating_sub(us)) as f64 / 1e6),
        ..IntakeStatus::default()
    };
    if !statements.table.tracked {
        return Ok(status);
    }
    let sql = "select state, count(*) from postroom_intake_rows where intake = ? group by state";
    for (state, count) in conn.exec::<(String, i64), _, _>(sql, (&intake.name,)).await? {
        match state.as_str() {
            "taken" => status.taken += count,
            "dead" => {
                status.taken += count;
                status.dead += count;
            }
            "refused" => status.refused = count,
            "unclear" => status.unclear = count,
            "unmarked" => status.unmarked = count,
            _ => {}
        }
    }
    let sql = "select row_key, state, id, coalesce(error, '') as error, timestampdiff(microsecond, at, utc_timestamp(6)) / 1e6 as age
                 from postroom_intake_rows where intake = ? and state in ('refused', 'unclear', 'unmarked') order by at desc, place desc limit ?";
    for mut row in conn.exec::<Row, _, _>(sql, (&intake.name, ASIDE_SHOWN)).await? {
        let row = &mut row;
        status.set_aside.push(SetAside {
            row: get(row, "row_key")?,
            state: get(row, "state")?,
            id: get(row, "id")?,
            error: get(row, "error")?,
            age_seconds: get(row, "age")?,
        });
    }
    Ok(status)
}

pub(crate) async fn again(conn: &mut Conn, intake: &Intake, row: Option<&str>, deed: &Deed) -> Result<u64, Failed> {
    let statements = statements(conn, intake).await?;
    let mut tx = begin(conn).await?;
    // Nobody may take them meanwhile.
    let sql = "select 1 from postroom_intakes where name = ? for update";
    tx.exec_first::<i64, _, _>(sql, (&intake.name,)).await?;
    let sql = "update postroom_intake_rows set state = 'taken', error = null
                where intake = ? and (row_key = ? or ? is null) and state = 'unmarked'";
    tx.exec_drop(sql, (&intake.name, row, row)).await?;
    let unmarked = tx.affected_rows();
    let sql = "select row_key, id from postroom_intake_rows
                where intake = ? and (row_key = ? or (? is null and state = 'refused')) and state in ('refused', 'unclear', 'discarded') for update";
    let gone: Vec<(String, Option<String>)> = tx.exec(sql, (&intake.name, row, row)).await?;
    let (keys, ids): (Vec<String>, Vec<Option<String>>) = gone.into_iter().unzip();
    let back: Vec<(String, Setting)> =
        intake.pending.iter().filter_map(|(name, values)| Some((name.clone(), values.first()?.setting()?))).collect();
    for key in &keys {
        let sql = "delete from postroom_intake_rows where intake = ? and row_key = ?";
        tx.exec_drop(sql, (&intake.name, key)).await?;
    }
    set(&mut tx, &statements, &back, &keys).await?;
    if unmarked > 0 || !keys.is_empty() {
        let ids: Vec<String> = ids.into_iter().flatten().collect();
        let filter = format!("{{\"intake\":{},\"rows\":{}}}", json(&intake.name), json(&keys));
        audit(&mut tx, deed, "intake.again", &filter, &ids).await?;
    }
    tx.commit().await?;
    Ok(keys.len() as u64 + unmarked)
}

pub(crate) async fn check(conn: &mut Conn, intake: &Intake) -> Result<Vec<Finding>, Failed> {
    let named = format!("intake {}, table {}", intake.name, intake.table);
    let Some(table) = Table::read(conn, intake).await? else {
        let advice = "name it as database.table; without a database it is looked for in that of the URL";
        return Ok(vec![Finding::bad(
            format!("{named}: there is no such table, or this user may not read it"),
            advice,
        )]);
    };
    if table.kind != "BASE TABLE" {
        let advice = "name the table that applications write to: rows of a view cannot be locked and marked";
        return Ok(vec![Finding::bad(format!("{named}: that is not a table"), advice)]);
    }
    let statements = match Statements::of(intake, table) {
        Ok(statements) => statements,
        Err(wrong) => {
            let advice = "change [[intake]] in the configuration";
            return Ok(wrong.into_iter().map(|what| Finding::bad(format!("{named}: {what}"), advice)).collect());
        }
    };
    // Each statement is planned, which also tries the rights.
    let nobody = IntakeRow { row: String::new(), cells: std::collections::BTreeMap::new() };
    let settings = |done: &Done| if let Done::Set(settings) = done { settings.clone() } else { Vec::new() };
    let mut tried = vec![("pending", statements.next_keys(&intake.name, 1)), ("pending", statements.free(&[nobody]))];
    for (place, settings) in
        [("taken", intake.taken.clone()), ("sent", settings(&intake.sent)), ("dead", intake.dead.clone())]
    {
        if !settings.is_empty() {
            tried.push((place, statements.set(&settings, &[], None)));
        }
    }
    if intake.sent == Done::Delete {
        tried.push(("sent", statements.delete(&[])));
    }
    for (place, (sql, values)) in tried {
        let planned: Result<Vec<Row>, Error> = conn.exec(format!("explain {sql}"), Params::Positional(values)).await;
        match planned {
            Ok(_) => {}
            Err(Error::Server(told)) => {
                let advice =
                    "change [[intake]] in the configuration, or grant the role select, update and delete on the table";
                return Ok(vec![Finding::bad(format!("{named}: {place}: {}", told.message), advice)]);
            }
            Err(error) => return Err(error.into()),
        }
    }
    if let Some(bad) = trial::tried(conn, intake, &statements, &named).await? {
        return Ok(vec![bad]);
    }
    let mut findings = vec![Finding::good(format!("{named}: its columns, values and rights are there"))];
    if let Some(why) = intake.without_index(&statements.table.shape, &statements.row) {
        let advice = "create an index on the columns of `pending` and `order`";
        findings.push(Finding::bad(format!("{named}: {why}"), advice));
    }
    Ok(findings)
}

pub(crate) async fn tables_with(conn: &mut Conn, columns: &[String]) -> Result<Vec<FoundTable>, Failed> {
    let sql = "select c.table_schema, c.table_name, c.column_name, c.column_type
                 from information_schema.columns c
                 join information_schema.tables t on t.table_schema = c.table_schema and t.table_name = c.table_name and t.table_type = 'BASE TABLE'
                where c.table_schema = database() and c.table_name not like 'postroom\\_%'
                order by c.table_schema, c.table_name, c.ordinal_position";
    let rows: Vec<(String, String, String, String)> = conn.query(sql).await?;
    let mut tables: Vec<FoundTable> = Vec::new();
    for (schema, name, column, kind) in rows {
        let table = TableName { schema: Some(schema), name };
        match tables.last_mut() {
            Some(last) if last.table == table => last.columns.push((column, kind)),
            _ => tables.push(FoundTable { table, columns: vec![(column, kind)] }),
        }
    }
    tables.retain(|table| columns.iter().all(|wanted| table.columns.iter().any(|(name, _)| name == wanted)));
    Ok(tables)
}
