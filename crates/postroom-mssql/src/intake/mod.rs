//! Tables that already exist: rows are taken into the outbox, and marked when their messages were sent. Each step is one transaction under
//! the lock of the intake's own row, so that one process at a time takes and rows enter the outbox in their order.

mod fates;
mod former;
mod table;
mod trial;

use std::collections::HashSet;

use postroom::{
    Deed, Done, DoneWhen, EnqueueError, Finding, FoundTable, Intake, IntakeRow, IntakeStatus, MarkedRows, Marking,
    Message, Outbox, Previewed, Searched, SetAside, Setting, StoreError, TableName, TookIn, crash_point,
};
use tiberius::Row;
use tiberius::error::Error;

use crate::Mssql;
use crate::conn::Conn;
use crate::desk::{Failed, begin};
use crate::inbox::ABOUT_VALUES;
use crate::intake::table::{Statement, Statements, Table, type_name};
use crate::operate::audit::audit;
use crate::sql::{NOW, get, json, named, seconds_since, since_1970};

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

/// Locks the intake's row. False: another process has it.
async fn turn(tx: &mut Conn, intake: &Intake) -> Result<bool, Error> {
    let sql = "select 1 from postroom_intakes with (updlock, rowlock, readcommittedlock, readpast) where name = @name";
    Ok(tx.first::<i64>(sql, named! { "name" => &intake.name }).await?.is_some())
}

async fn register(conn: &mut Conn, intake: &Intake) -> Result<(), Error> {
    let sql = "insert into postroom_intakes (name)
               select @name where not exists (select 1 from postroom_intakes i with (updlock, holdlock) where i.name = @name)";
    let known = "select 1 from postroom_intakes where name = @name";
    let of = || named! { "name" => &intake.name };
    match conn.first::<i64>(known, of()).await? {
        Some(_) => Ok(()),
        None => conn.exec(sql, of()).await.map(drop),
    }
}

async fn rows(tx: &mut Conn, (sql, parameters): Statement) -> Result<Vec<Row>, Error> {
    tx.rows(&sql, parameters).await
}

async fn whole(tx: &mut Conn, statements: &Statements, statement: Statement) -> Result<Vec<IntakeRow>, Error> {
    rows(tx, statement).await?.iter().map(|row| statements.whole(row)).collect()
}

async fn change(tx: &mut Conn, (sql, parameters): Statement) -> Result<(), Error> {
    tx.exec(&sql, parameters).await.map(drop)
}

async fn now_us(conn: &mut Conn) -> Result<i64, Error> {
    Ok(conn.first(&format!("select {}", since_1970(NOW)), named! {}).await?.unwrap_or_default())
}

/// The row is at fault, and not the table or our rights: a constraint, a trigger, a value.
fn of_row(error: &Error) -> Option<String> {
    const TAKEN: [u32; 2] = [2601, 2627];
    const TRIGGER: u32 = 3609;
    /// What procedures and triggers raise themselves.
    const RAISED: u32 = 50000;
    let Error::Server(told) = error else { return None };
    let code = told.code();
    let by_row = ABOUT_VALUES.contains(&code) || TAKEN.contains(&code) || code == TRIGGER || code >= RAISED;
    by_row.then(|| told.message().to_owned())
}

/// Runs what may fail because of a row; then nothing of it stays. The reason, if it failed. Some errors, such as one of a trigger that rolls back,
/// end the whole transaction: then nothing that it did stays, and the error is the caller's.
async fn tried<T>(
    tx: &mut Conn,
    work: impl AsyncFnOnce(&mut Conn) -> Result<T, Error>,
) -> Result<Result<T, String>, Error> {
    tx.batch("save transaction postroom_rows").await?;
    tx.batch("set xact_abort off").await?;
    let done = match work(tx).await {
        Ok(value) => Ok(value),
        Err(error) => {
            let told = of_row(&error);
            let sound = tx.first::<i64>("select convert(int, xact_state())", named! {}).await? == Some(1);
            let Some(told) = told.filter(|_| sound) else { return Err(error) };
            tx.batch("rollback transaction postroom_rows").await?;
            Err(told)
        }
    };
    tx.batch("set xact_abort on").await?;
    Ok(done)
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
    let tx = begin(conn).await?;
    if !turn(tx, intake).await? {
        return Ok(TookIn { others: true, ..TookIn::default() });
    }
    if intake.done == DoneWhen::Sent && intake.taken.is_empty() {
        let sql = format!(
            "select count_big(*) from (select top ({OPEN_MAX}) 1 as one from postroom_intake_rows where intake = @name and state = 'taken') c"
        );
        let open: i64 = tx.first(&sql, named! { "name" => &intake.name }).await?.unwrap_or_default();
        max = max.min(usize::try_from(OPEN_MAX - open).unwrap_or_default());
        if max == 0 {
            return Ok(TookIn::default());
        }
    }
    let mut search = intake.search(max);
    while let Some(many) = search.reads() {
        let many = i64::try_from(many).unwrap_or(i64::MAX);
        let next = rows(tx, statements.next_keys(&intake.name, many)).await?;
        search.read(next.iter().map(|row| statements.keys_of(row)).collect::<Result<_, _>>()?);
        while let Some(chunk) = search.locks() {
            let free = self::whole(tx, &statements, statements.free(&chunk)).await?;
            search.locked(&chunk, free);
        }
    }
    let Searched { whole, held, more } = search.end();
    if whole.is_empty() {
        return Ok(TookIn { held, ..TookIn::default() });
    }
    let now = now_us(tx).await?;
    let (mut messages, mut refused): (Vec<(String, Message)>, Vec<Refused>) = (Vec::new(), Vec::new());
    for row in whole {
        match intake.message.message(&intake.table, &row, now) {
            Ok(message) => messages.push((row.row, message)),
            Err(error) => refused.push(Refused { row: row.row, id: None, error }),
        }
    }
    refuse_known(tx, &mut messages, &mut refused).await?;
    let taken = write(tx, intake, &statements, messages, &mut refused).await?;
    set_aside(tx, intake, &statements, &refused).await?;
    crash_point("intake-before-commit");
    tx.commit().await?;
    crash_point("intake-after-commit");
    Ok(TookIn { taken, refused: refused.len() as u64, held, more, others: false })
}

/// Sets messages aside whose id is in the outbox, or among those before them: the same message, written twice.
async fn refuse_known(
    tx: &mut Conn,
    messages: &mut Vec<(String, Message)>,
    refused: &mut Vec<Refused>,
) -> Result<(), Error> {
    let ids: Vec<String> = messages.iter().map(|(_, message)| message.id.to_string()).collect();
    let sql = "select o.id from openjson(@ids) with (id uniqueidentifier '$') n join postroom_outbox o on o.id = n.id";
    let known: Vec<String> = tx.query(sql, named! { "ids" => json(&ids) }).await?;
    let mut known: HashSet<String> = known.into_iter().collect();
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

async fn note_taken(tx: &mut Conn, intake: &Intake, keys: &[String], messages: &[Message]) -> Result<(), Error> {
    let rows: Vec<(usize, &String, String)> =
        keys.iter().zip(messages).enumerate().map(|(at, (key, message))| (at, key, message.id.to_string())).collect();
    // Places in the order of the rows.
    let sql = "insert into postroom_intake_rows (intake, row_key, id, seq, state)
               select @intake, n.row_key, n.id, o.seq, 'taken'
                 from openjson(@rows) with (number bigint '$[0]', row_key nvarchar(512) '$[1]', id uniqueidentifier '$[2]') n
                 join postroom_outbox o on o.id = n.id order by n.number";
    tx.exec(sql, named! { "intake" => &intake.name, "rows" => json(&rows) }).await.map(drop)
}

/// Writes the messages and marks their rows: all at once, or one by one if one of them cannot be; that one is set aside. Returns how many.
async fn write(
    tx: &mut Conn,
    intake: &Intake,
    statements: &Statements,
    messages: Vec<(String, Message)>,
    refused: &mut Vec<Refused>,
) -> Result<u64, Error> {
    let count = messages.len();
    let (keys, messages): (Vec<String>, Vec<Message>) = messages.into_iter().unzip();
    let all = async |tx: &mut Conn| write_at_once(tx, intake, statements, &keys, &messages).await;
    if tried(tx, all).await?.is_ok() {
        return Ok(count as u64);
    }
    let mut taken = 0;
    for (key, message) in keys.iter().zip(&messages) {
        let (keys, messages) = (std::slice::from_ref(key), std::slice::from_ref(message));
        let one = async |tx: &mut Conn| write_at_once(tx, intake, statements, keys, messages).await;
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
    tx: &mut Conn,
    intake: &Intake,
    statements: &Statements,
    keys: &[String],
    messages: &[Message],
) -> Result<(), Error> {
    Mssql.enqueue(tx, messages).await.map_err(|error| match error {
        EnqueueError::Store(source) => match source.downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::Conversion(source.to_string().into()),
        },
        other => Error::Conversion(other.to_string().into()),
    })?;
    match intake.done {
        DoneWhen::Sent => {
            note_taken(tx, intake, keys, messages).await?;
            set(tx, statements, &intake.taken, keys).await
        }
        DoneWhen::Taken => finish(tx, statements, &intake.sent, keys).await,
    }
}

async fn set_aside(tx: &mut Conn, intake: &Intake, statements: &Statements, refused: &[Refused]) -> Result<(), Error> {
    for Refused { row, id, error } in refused {
        let sql = "insert into postroom_intake_rows (intake, row_key, id, state, error) values (@intake, @row, @id, 'refused', @error)";
        let parameters = named! { "intake" => &intake.name, "row" => row, "id" => id.as_ref(), "error" => error };
        tx.exec(sql, parameters).await?;
        // One that refuses stays as it is.
        let mark = async |tx: &mut Conn| set_error(tx, statements, &intake.dead, row, error).await;
        let _ = tried(tx, mark).await?;
    }
    Ok(())
}

/// Marks rows as sent: all at once, or one by one if one of them refuses.
async fn finish_where_possible(
    tx: &mut Conn,
    statements: &Statements,
    done: &Done,
    marking: &mut Marking,
) -> Result<(), Error> {
    let all = marking.sent.clone();
    let at_once = async |tx: &mut Conn| finish(tx, statements, done, &all).await;
    if tried(tx, at_once).await?.is_ok() {
        return Ok(());
    }
    for row in &all {
        let one = async |tx: &mut Conn| finish(tx, statements, done, std::slice::from_ref(row)).await;
        if let Err(told) = tried(tx, one).await? {
            marking.unmarked(row, &told);
        }
    }
    Ok(())
}

async fn set_error(
    tx: &mut Conn,
    statements: &Statements,
    settings: &[(String, Setting)],
    row: &String,
    error: &str,
) -> Result<(), Error> {
    if settings.is_empty() {
        return Ok(());
    }
    change(tx, statements.set(settings, std::slice::from_ref(row), Some(error))).await
}

async fn set(
    tx: &mut Conn,
    statements: &Statements,
    settings: &[(String, Setting)],
    keys: &[String],
) -> Result<(), Error> {
    for keys in keys.chunks(CHUNK).filter(|_| !settings.is_empty()) {
        change(tx, statements.set(settings, keys, None)).await?;
    }
    Ok(())
}

async fn finish(tx: &mut Conn, statements: &Statements, done: &Done, keys: &[String]) -> Result<(), Error> {
    match done {
        Done::Set(settings) => set(tx, statements, settings, keys).await,
        Done::Delete => {
            for keys in keys.chunks(CHUNK) {
                change(tx, statements.delete(keys)).await?;
            }
            Ok(())
        }
    }
}

pub(crate) async fn mark_rows(conn: &mut Conn, intake: &Intake, after: i64, max: usize) -> Result<MarkedRows, Failed> {
    let statements = statements(conn, intake).await?;
    register(conn, intake).await?;
    let tx = begin(conn).await?;
    if !turn(tx, intake).await? {
        return Ok(MarkedRows { others: true, ..MarkedRows::default() });
    }
    let taken = fates::of(tx, intake, after, max).await?;
    let next = taken.last().map(|taken| taken.place).filter(|_| taken.len() >= max);
    let mut marking = Marking::default();
    for taken in taken {
        marking.note(taken.row, taken.was_dead, taken.fate);
    }
    finish_where_possible(tx, &statements, &intake.sent, &mut marking).await?;
    let sql = "delete r
                 from openjson(@rows) with (row_key nvarchar(512) '$') n
                 join postroom_intake_rows r with (rowlock) on r.intake = @intake and r.row_key = n.row_key collate Latin1_General_100_BIN2
               option (loop join, force order)";
    if !marking.sent.is_empty() {
        tx.exec(sql, named! { "rows" => json(&marking.sent), "intake" => &intake.name }).await?;
    }
    for (row, error) in &marking.dead {
        let mark = async |tx: &mut Conn| set_error(tx, &statements, &intake.dead, row, error).await;
        let _ = tried(tx, mark).await?;
    }
    for (row, state, error) in &marking.changed {
        let sql =
            "update postroom_intake_rows set state = @state, error = @error where intake = @intake and row_key = @row";
        let parameters = named! { "state" => *state, "error" => error, "intake" => &intake.name, "row" => row };
        tx.exec(sql, parameters).await?;
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
    let next = statements.next(&intake.name, i64::try_from(max).unwrap_or(i64::MAX));
    let found = whole(conn, &statements, next).await?;
    let now = now_us(conn).await?;
    let previewed = found
        .into_iter()
        .map(|row| Previewed { message: intake.message.message(&intake.table, &row, now), row: row.row });
    Ok(previewed.collect())
}

pub(crate) async fn status(conn: &mut Conn, intake: &Intake) -> Result<IntakeStatus, Failed> {
    let statements = statements(conn, intake).await?;
    let time = intake.message.occurred_at.as_ref().and_then(|template| template.sole_column());
    let (sql, parameters) = statements.count(&intake.name, time, COUNTED);
    let (pending, oldest): (i64, Option<i64>) = conn.first(&sql, parameters).await?.unwrap_or_default();
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
    let of = || named! { "intake" => &intake.name };
    let sql = "select state, count_big(*) from postroom_intake_rows where intake = @intake group by state";
    for (state, count) in conn.query::<(String, i64)>(sql, of()).await? {
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
    let sql = format!(
        "select top ({ASIDE_SHOWN}) row_key, state, id, coalesce(error, N'') as error, {} as age
           from postroom_intake_rows where intake = @intake and state in ('refused', 'unclear', 'unmarked') order by at desc, place desc",
        seconds_since("at")
    );
    for row in &conn.rows(&sql, of()).await? {
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
    let tx = begin(conn).await?;
    // Nobody may take them meanwhile.
    let of = || named! { "intake" => &intake.name, "row" => row };
    let sql = "select 1 from postroom_intakes with (updlock) where name = @intake";
    tx.first::<i64>(sql, of()).await?;
    let sql = "update postroom_intake_rows set state = 'taken', error = null
                where intake = @intake and (row_key = @row or @row is null) and state = 'unmarked'";
    let unmarked = tx.exec(sql, of()).await?;
    let sql = "select r.row_key, r.id from postroom_intake_rows r with (updlock, rowlock)
                where r.intake = @intake and (r.row_key = @row or (@row is null and r.state = 'refused'))
                  and r.state in ('refused', 'unclear', 'discarded')";
    let gone: Vec<(String, Option<String>)> = tx.query(sql, of()).await?;
    let (keys, ids): (Vec<String>, Vec<Option<String>>) = gone.into_iter().unzip();
    let back: Vec<(String, Setting)> =
        intake.pending.iter().filter_map(|(name, values)| Some((name.clone(), values.first()?.setting()?))).collect();
    for key in &keys {
        let sql = "delete from postroom_intake_rows where intake = @intake and row_key = @key";
        tx.exec(sql, named! { "intake" => &intake.name, "key" => key }).await?;
    }
    set(tx, &statements, &back, &keys).await?;
    if unmarked > 0 || !keys.is_empty() {
        let ids: Vec<String> = ids.into_iter().flatten().collect();
        let filter = format!("{{\"intake\":{},\"rows\":{}}}", json(&intake.name), json(&keys));
        audit(tx, deed, "intake.again", &filter, &ids).await?;
    }
    tx.commit().await?;
    Ok(keys.len() as u64 + unmarked)
}

pub(crate) async fn check(conn: &mut Conn, intake: &Intake) -> Result<Vec<Finding>, Failed> {
    let named = format!("intake {}, table {}", intake.name, intake.table);
    let Some(table) = Table::read(conn, intake).await? else {
        let advice = "name it as schema.table; without a schema it is looked for in that of the role";
        return Ok(vec![Finding::bad(
            format!("{named}: there is no such table, or this user may not read it"),
            advice,
        )]);
    };
    if !table.is_table {
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
    // Each statement is run on no row, which also tries the rights; and all is rolled back.
    let settings = |done: &Done| if let Done::Set(settings) = done { settings.clone() } else { Vec::new() };
    let mut tried = vec![("pending", statements.next_keys(&intake.name, 1)), ("pending", statements.free(&[]))];
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
    let tx = begin(conn).await?;
    for (place, statement) in tried {
        match rows(tx, statement).await {
            Ok(_) => {}
            Err(Error::Server(told)) => {
                let advice =
                    "change [[intake]] in the configuration, or grant the role select, update and delete on the table";
                return Ok(vec![Finding::bad(format!("{named}: {place}: {}", told.message()), advice)]);
            }
            Err(error) => return Err(error.into()),
        }
    }
    let refused = trial::tried(tx, intake, &statements, &named).await?;
    tx.rollback().await?;
    if let Some(bad) = refused {
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
    let sql = "select s.name, o.name, c.name, coalesce(t.name, N'another'), convert(int, c.max_length), convert(int, c.precision), convert(int, c.scale)
                 from sys.columns c
                 join sys.objects o on o.object_id = c.object_id and o.type = 'U'
                 join sys.schemas s on s.schema_id = o.schema_id
                 left join sys.types t on t.user_type_id = c.system_type_id
                where o.name not like N'postroom|_%' escape '|'
                order by s.name, o.name, c.column_id";
    let rows: Vec<(String, String, String, String, i64, i64, i64)> = conn.query(sql, named! {}).await?;
    let mut tables: Vec<FoundTable> = Vec::new();
    for (schema, name, column, kind, length, precision, scale) in rows {
        let kind = type_name(&kind, length, precision, scale);
        let table = TableName { schema: Some(schema), name };
        match tables.last_mut() {
            Some(last) if last.table == table => last.columns.push((column, kind)),
            _ => tables.push(FoundTable { table, columns: vec![(column, kind)] }),
        }
    }
    tables.retain(|table| columns.iter().all(|wanted| table.columns.iter().any(|(name, _)| name == wanted)));
    Ok(tables)
}
