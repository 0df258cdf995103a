//! Tables that already exist: rows are taken into the outbox, and marked when their messages were sent. Each step is one transaction under
//! the lock of the intake's own row, so that one process at a time takes and rows enter the outbox in their order.

mod former;
mod table;
mod trial;

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use postroom::{
    Deed, Done, DoneWhen, EnqueueError, Finding, FoundTable, Intake, IntakeStatus, MarkedRows, Marking, Message,
    Outbox, Previewed, RowFate, Searched, SetAside, Setting, StoreError, TableName, TookIn, crash_point,
};
use tokio_postgres::Transaction;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use crate::Postgres;
use crate::connect::Connector;
use crate::intake::table::{Statements, Table};
use crate::link::store_error;
use crate::operate::OperatorSession;
use crate::operate::dead::audit;
use crate::text::{Text, shown};

pub(crate) use former::{free, indexes, senders};

/// Where nothing in the table says that a row was taken, so many are taken at most before some of them are done: each look reads them again.
const OPEN_MAX: i64 = 10_000;
/// Rows are counted up to this.
const COUNTED: i64 = 10_000;
/// So many rows that were set aside are shown.
const ASIDE_SHOWN: i64 = 20;
/// An update of a row that is there had no effect.
const UNCHANGED: &str = "the update had no effect: a trigger or a policy of the table suppresses it";

/// What the steps of one intake keep from one to the next.
pub(crate) struct Kept {
    session: OperatorSession,
    intake: Intake,
    statements: Statements,
}

/// By the name of the intake.
#[derive(Default)]
pub(crate) struct AllKept(Mutex<HashMap<String, Kept>>);

impl AllKept {
    fn take(&self, intake: &Intake) -> Option<Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&intake.name)
    }

    fn put(&self, kept: Kept) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(kept.intake.name.clone(), kept);
    }
}

fn wrong(intake: &Intake, wrong: &[String]) -> StoreError {
    let source = format!("intake {}, table {}: {}", intake.name, intake.table, wrong.join("; ")).into();
    StoreError::Refused { what: "take rows of a table; nothing was taken", source }
}

/// A transaction in which the application's triggers find what they name, as in one of the role's own. Our statements name schemas.
async fn deed(session: &mut OperatorSession) -> Result<Transaction<'_>, StoreError> {
    let tx = session.deed().await?;
    let set = tx.batch_execute("set local search_path to default").await;
    set.map_err(|error| store_error("begin a transaction", error))?;
    Ok(tx)
}

async fn statements(tx: &Transaction<'_>, intake: &Intake) -> Result<Statements, StoreError> {
    let read = Table::read(tx, intake).await.map_err(|error| store_error("look at a table", error))?;
    let table = read.ok_or_else(|| wrong(intake, &["there is no such table".to_owned()]))?;
    Statements::of(intake, table).map_err(|what| wrong(intake, &what))
}

impl Kept {
    /// The connection of the step before, if it was for the same mapping.
    async fn of(connector: &Connector, kept: Option<Self>, intake: &Intake) -> Result<Self, StoreError> {
        if let Some(kept) = kept.filter(|kept| kept.intake == *intake) {
            return Ok(kept);
        }
        let mut session = OperatorSession::open(connector).await?;
        let tx = session.deed().await?;
        let statements = statements(&tx, intake).await?;
        let sql = "insert into postroom.intakes (name) values ($1) on conflict do nothing";
        tx.execute(sql, &[&intake.name]).await.map_err(|error| store_error("register an intake", error))?;
        tx.commit().await.map_err(|error| store_error("register an intake", error))?;
        Ok(Self { session, intake: intake.clone(), statements })
    }
}

/// The intake's own row, locked. False: another process has it.
async fn turn(tx: &Transaction<'_>, intake: &Intake) -> Result<bool, tokio_postgres::Error> {
    let sql = "select from postroom.intakes i where i.name = $1 for update skip locked";
    Ok(tx.query_opt(sql, &[&intake.name]).await?.is_some())
}

fn parameters<'a>(
    first: &'a (dyn ToSql + Sync),
    second: &'a (dyn ToSql + Sync),
    values: &'a [String],
) -> Vec<&'a (dyn ToSql + Sync)> {
    [first, second].into_iter().chain(values.iter().map(|value| value as &(dyn ToSql + Sync))).collect()
}

async fn now_us(tx: &Transaction<'_>) -> Result<i64, tokio_postgres::Error> {
    tx.query_one("select (extract(epoch from clock_timestamp()) * 1000000)::bigint", &[]).await?.try_get(0)
}

/// Sorts an error about the application's table. What the server says in detail may be the content of a row.
fn table_error(what: &'static str, error: tokio_postgres::Error) -> StoreError {
    let told = error.as_db_error().map(|told| told.message().to_owned());
    match (store_error(what, error), told) {
        (StoreError::Refused { what, .. }, Some(told)) => StoreError::Refused { what, source: told.into() },
        (StoreError::Busy { what, .. }, Some(told)) => StoreError::Busy { what, source: told.into() },
        (StoreError::Schema { problem, .. }, _) => StoreError::Refused { what, source: problem.into() },
        (error, _) => error,
    }
}

/// The row is at fault, and not the table or our rights: a constraint, a trigger, a value.
fn of_row(error: &tokio_postgres::Error) -> Option<String> {
    let told = error.as_db_error()?;
    let class = told.code().code().get(..2)?;
    ["22", "23", "44", "P0"].contains(&class).then(|| told.message().to_owned())
}

/// Why a step could not be made.
enum Failed {
    /// One of the rows is at fault.
    Row(String),
    Step(StoreError),
}

impl Failed {
    fn of(error: tokio_postgres::Error) -> Self {
        match of_row(&error) {
            Some(told) => Self::Row(told),
            None => Self::Step(table_error("change rows of a table; nothing was changed", error)),
        }
    }
}

/// What a row that is set aside is set aside for.
struct Refused {
    row: String,
    id: Option<Uuid>,
    error: String,
}

pub(crate) async fn take_in(
    connector: &Connector,
    kept: &AllKept,
    intake: &Intake,
    mut max: usize,
) -> Result<TookIn, StoreError> {
    let failed = |error| table_error("take rows of a table; nothing was taken", error);
    let mut at_hand = Kept::of(connector, kept.take(intake), intake).await?;
    let Kept { session, statements, .. } = &mut at_hand;
    let mut tx = deed(session).await?;
    if !turn(&tx, intake).await.map_err(failed)? {
        drop(tx);
        kept.put(at_hand);
        return Ok(TookIn { others: true, ..TookIn::default() });
    }
    if intake.done == DoneWhen::Sent && intake.taken.is_empty() {
        let sql = "select count(*) from (select from postroom.intake_rows r where r.intake = $1 and r.state = 'taken' limit $2) c";
        let open: i64 =
            tx.query_one(sql, &[&intake.name, &OPEN_MAX]).await.map_err(failed)?.try_get(0).map_err(failed)?;
        max = max.min(usize::try_from(OPEN_MAX - open).unwrap_or_default());
        if max == 0 {
            drop(tx);
            kept.put(at_hand);
            return Ok(TookIn::default());
        }
    }
    let mut search = intake.search(max);
    while let Some(many) = search.reads() {
        let many = i64::try_from(many).unwrap_or(i64::MAX);
        let values = parameters(&intake.name, &many, &statements.pending_values);
        let next = tx.query(&statements.next_keys(), &values).await.map_err(failed)?;
        search.read(next.iter().map(|row| statements.keys_of(row)).collect::<Result<_, _>>().map_err(failed)?);
        while let Some(chunk) = search.locks() {
            let keys: Vec<&str> = chunk.iter().map(|row| row.row.as_str()).collect();
            let values = parameters(&intake.name, &keys, &statements.pending_values);
            let free = tx.query(&statements.free(), &values).await.map_err(failed)?;
            let free = free.iter().map(|row| statements.whole(row)).collect::<Result<_, _>>().map_err(failed)?;
            search.locked(&chunk, free);
        }
    }
    let Searched { whole, held, more } = search.end();
    if whole.is_empty() {
        drop(tx);
        kept.put(at_hand);
        return Ok(TookIn { held, ..TookIn::default() });
    }
    let now = now_us(&tx).await.map_err(failed)?;
    let (mut messages, mut refused): (Vec<(String, Message)>, Vec<Refused>) = (Vec::new(), Vec::new());
    for row in whole {
        match intake.message.message(&intake.table, &row, now) {
            Ok(message) => messages.push((row.row, message)),
            Err(error) => refused.push(Refused { row: row.row, id: None, error }),
        }
    }
    refuse_known(&tx, &mut messages, &mut refused).await.map_err(failed)?;
    let taken = write(&mut tx, intake, statements, messages, &mut refused).await?;
    set_aside(&mut tx, intake, statements, &refused).await?;
    crash_point("intake-before-commit");
    tx.commit().await.map_err(failed)?;
    crash_point("intake-after-commit");
    kept.put(at_hand);
    Ok(TookIn { taken, refused: refused.len() as u64, held, more, others: false })
}

/// Sets messages aside whose id is in the outbox, or among those before them: the same message, written twice.
async fn refuse_known(
    tx: &Transaction<'_>,
    messages: &mut Vec<(String, Message)>,
    refused: &mut Vec<Refused>,
) -> Result<(), tokio_postgres::Error> {
    let ids: Vec<Uuid> = messages.iter().map(|(_, message)| *message.id.as_uuid()).collect();
    let known = tx.query("select o.id from postroom.outbox o where o.id = any ($1)", &[&ids]).await?;
    let mut known: HashSet<Uuid> = known.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
    messages.retain(|(row, message)| {
        let id = *message.id.as_uuid();
        let is_new = known.insert(id);
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

/// Writes the messages and marks their rows: all at once, or one by one if one of them cannot be; that one is set aside. Returns how many.
async fn write(
    tx: &mut Transaction<'_>,
    intake: &Intake,
    statements: &Statements,
    messages: Vec<(String, Message)>,
    refused: &mut Vec<Refused>,
) -> Result<u64, StoreError> {
    let count = messages.len();
    let (rows, messages): (Vec<String>, Vec<Message>) = messages.into_iter().unzip();
    match write_at_once(tx, intake, statements, &rows, &messages).await {
        Ok(()) => return Ok(count as u64),
        Err(Failed::Step(error)) => return Err(error),
        Err(Failed::Row(_)) => {}
    }
    let mut taken = 0;
    for (row, message) in rows.into_iter().zip(messages) {
        match write_at_once(tx, intake, statements, std::slice::from_ref(&row), std::slice::from_ref(&message)).await {
            Ok(()) => taken += 1,
            Err(Failed::Row(told)) => {
                let error = format!("the row cannot be marked as taken: {told}");
                refused.push(Refused { row, id: None, error });
            }
            Err(Failed::Step(error)) => return Err(error),
        }
    }
    Ok(taken)
}

async fn write_at_once(
    tx: &mut Transaction<'_>,
    intake: &Intake,
    statements: &Statements,
    rows: &[String],
    messages: &[Message],
) -> Result<(), Failed> {
    let mut point = tx.savepoint("postroom_rows").await.map_err(Failed::of)?;
    Postgres.enqueue(&mut point, messages).await.map_err(|error| match error {
        EnqueueError::Store(source) => match source.downcast::<tokio_postgres::Error>() {
            Ok(error) => Failed::of(*error),
            Err(source) => Failed::Step(StoreError::Refused { what: "write messages", source }),
        },
        other => Failed::Row(other.to_string()),
    })?;
    match intake.done {
        DoneWhen::Sent => {
            let ids: Vec<Uuid> = messages.iter().map(|message| *message.id.as_uuid()).collect();
            let sql = "insert into postroom.intake_rows (intake, row_key, id, state)
                       select $1, u.row_key, u.id, 'taken' from unnest($2::text[], $3::uuid[]) with ordinality u (row_key, id, n) order by u.n";
            point.execute(sql, &[&intake.name, &rows, &ids]).await.map_err(Failed::of)?;
            // They are locked here, so nobody else has removed them.
            if set(&point, statements, &intake.taken, rows, &[]).await.map_err(Failed::of)? < rows.len() as u64 {
                return Err(Failed::Row(UNCHANGED.to_owned()));
            }
        }
        DoneWhen::Taken => finish(&point, statements, &intake.sent, rows).await.map_err(Failed::of)?,
    }
    point.commit().await.map_err(Failed::of)
}

async fn set_aside(
    tx: &mut Transaction<'_>,
    intake: &Intake,
    statements: &Statements,
    refused: &[Refused],
) -> Result<(), StoreError> {
    if refused.is_empty() {
        return Ok(());
    }
    let failed = |error| table_error("set rows aside; nothing was changed", error);
    let rows: Vec<String> = refused.iter().map(|refused| refused.row.clone()).collect();
    let (ids, errors): (Vec<Option<Uuid>>, Vec<&str>) =
        refused.iter().map(|refused| (refused.id, refused.error.as_str())).unzip();
    let sql = "insert into postroom.intake_rows (intake, row_key, id, state, error)
               select $1, u.row_key, u.id, 'refused', u.error from unnest($2::text[], $3::uuid[], $4::text[]) u (row_key, id, error)";
    tx.execute(sql, &[&intake.name, &rows, &ids, &errors]).await.map_err(failed)?;
    set_where_possible(tx, statements, &intake.dead, &rows, &errors).await
}

/// Sets columns of rows; one that refuses stays as it is.
async fn set_where_possible(
    tx: &mut Transaction<'_>,
    statements: &Statements,
    settings: &[(String, Setting)],
    rows: &[String],
    errors: &[&str],
) -> Result<(), StoreError> {
    for (row, error) in rows.iter().zip(errors) {
        let failed = |error| table_error("mark rows; nothing was changed", error);
        let point = tx.savepoint("postroom_row").await.map_err(failed)?;
        match set(&point, statements, settings, std::slice::from_ref(row), &[error]).await {
            Ok(_) => point.commit().await.map_err(failed)?,
            Err(error) if of_row(&error).is_some() => point.rollback().await.map_err(failed)?,
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(())
}

/// How many rows were changed.
async fn set(
    tx: &Transaction<'_>,
    statements: &Statements,
    settings: &[(String, Setting)],
    rows: &[String],
    errors: &[&str],
) -> Result<u64, tokio_postgres::Error> {
    if settings.is_empty() || rows.is_empty() {
        return Ok(rows.len() as u64);
    }
    let (sql, values) = statements.set(settings);
    tx.execute(&sql, &parameters(&rows, &errors, &values)).await
}

async fn finish(
    tx: &Transaction<'_>,
    statements: &Statements,
    done: &Done,
    rows: &[String],
) -> Result<(), tokio_postgres::Error> {
    match done {
        Done::Set(settings) => set(tx, statements, settings, rows, &[]).await.map(drop),
        Done::Delete if rows.is_empty() => Ok(()),
        Done::Delete => tx.execute(&statements.delete(), &[&rows]).await.map(drop),
    }
}

/// Marks rows as sent: all at once, or one by one if one of them refuses.
async fn finish_where_possible(
    tx: &mut Transaction<'_>,
    statements: &Statements,
    done: &Done,
    marking: &mut Marking,
) -> Result<(), StoreError> {
    let failed = |error| table_error("mark rows that were sent; none was marked", error);
    let all = marking.sent.clone();
    let point = tx.savepoint("postroom_rows").await.map_err(failed)?;
    match finish(&point, statements, done, &all).await {
        Ok(()) => return point.commit().await.map_err(failed),
        Err(error) if of_row(&error).is_some() => point.rollback().await.map_err(failed)?,
        Err(error) => return Err(failed(error)),
    }
    for row in all {
        let point = tx.savepoint("postroom_row").await.map_err(failed)?;
        match finish(&point, statements, done, std::slice::from_ref(&row)).await {
            Ok(()) => point.commit().await.map_err(failed)?,
            Err(error) => match of_row(&error) {
                Some(told) => {
                    point.rollback().await.map_err(failed)?;
                    marking.unmarked(&row, &told);
                }
                None => return Err(failed(error)),
            },
        }
    }
    Ok(())
}

pub(crate) async fn mark_rows(
    connector: &Connector,
    kept: &AllKept,
    intake: &Intake,
    after: i64,
    max: usize,
) -> Result<MarkedRows, StoreError> {
    let failed = |error| table_error("mark rows that were sent", error);
    let mut at_hand = Kept::of(connector, kept.take(intake), intake).await?;
    let Kept { session, statements, .. } = &mut at_hand;
    let mut tx = deed(session).await?;
    if !turn(&tx, intake).await.map_err(failed)? {
        drop(tx);
        kept.put(at_hand);
        return Ok(MarkedRows { others: true, ..MarkedRows::default() });
    }
    let max = i64::try_from(max).unwrap_or(i64::MAX);
    let rows = tx.query(include_str!("sql/fates.sql"), &[&intake.name, &after, &max]).await.map_err(failed)?;
    let (mut marking, mut next) = (Marking::default(), None);
    for row in &rows {
        let read = || -> Result<(i64, String, String, String, Option<Text>), tokio_postgres::Error> {
            Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(3)?, row.try_get(4)?, row.try_get(5)?))
        };
        let (place, key, state, fate, error) = read().map_err(failed)?;
        next = Some(place);
        let error = error.map(|error| error.text).unwrap_or_default();
        let fate = match fate.as_str() {
            "sent" => RowFate::Sent,
            "dead" => RowFate::Dead(error),
            "discarded" => RowFate::Discarded(error),
            "waits" => RowFate::Waits,
            _ => RowFate::Unclear,
        };
        marking.note(key, state == "dead", fate);
    }
    let next = next.filter(|_| rows.len() as i64 >= max);
    finish_where_possible(&mut tx, statements, &intake.sent, &mut marking).await?;
    let Marking { sent, dead, changed } = &marking;
    if !sent.is_empty() {
        let sql = "delete from postroom.intake_rows r where r.intake = $1 and r.row_key = any ($2)";
        tx.execute(sql, &[&intake.name, sent]).await.map_err(failed)?;
    }
    let (keys, errors): (Vec<String>, Vec<&str>) =
        dead.iter().map(|(key, error)| (key.clone(), error.as_str())).unzip();
    set_where_possible(&mut tx, statements, &intake.dead, &keys, &errors).await?;
    if !changed.is_empty() {
        let keys: Vec<&str> = changed.iter().map(|(key, ..)| key.as_str()).collect();
        let states: Vec<&str> = changed.iter().map(|(_, state, _)| *state).collect();
        let errors: Vec<&str> = changed.iter().map(|(.., error)| error.as_str()).collect();
        let sql = "update postroom.intake_rows r set state = u.state, error = u.error
                     from unnest($2::text[], $3::text[], $4::text[]) u (row_key, state, error) where r.intake = $1 and r.row_key = u.row_key";
        tx.execute(sql, &[&intake.name, &keys, &states, &errors]).await.map_err(failed)?;
    }
    tx.commit().await.map_err(failed)?;
    let marked = MarkedRows {
        sent: sent.len() as u64,
        dead: dead.len() as u64,
        unclear: marking.unclear(),
        unmarked: marking.unmarked_count(),
        next,
        others: false,
    };
    kept.put(at_hand);
    Ok(marked)
}

pub(crate) async fn preview(connector: &Connector, intake: &Intake, max: usize) -> Result<Vec<Previewed>, StoreError> {
    let failed = |error| table_error("look at rows of a table", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let statements = statements(&tx, intake).await?;
    let max = i64::try_from(max).unwrap_or(i64::MAX);
    let values = parameters(&intake.name, &max, &statements.pending_values);
    let rows = tx.query(&statements.next(), &values).await.map_err(failed)?;
    let now = now_us(&tx).await.map_err(failed)?;
    rows.iter()
        .map(|row| {
            let row = statements.whole(row).map_err(failed)?;
            Ok(Previewed { message: intake.message.message(&intake.table, &row, now), row: row.row })
        })
        .collect()
}

pub(crate) async fn status(connector: &Connector, intake: &Intake) -> Result<IntakeStatus, StoreError> {
    let failed = |error| store_error("look at an intake", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let statements = statements(&tx, intake).await?;
    let time = intake.message.occurred_at.as_ref().and_then(|template| template.sole_column());
    let values = parameters(&intake.name, &COUNTED, &statements.pending_values);
    let row = tx.query_one(&statements.count(time), &values).await.map_err(failed)?;
    let (pending, oldest): (i64, Option<i64>) = (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
    let now = now_us(&tx).await.map_err(failed)?;
    let counted = IntakeStatus {
        pending,
        pending_is_bound: pending >= COUNTED,
        oldest_seconds: oldest.map(|us| (now.saturating_sub(us)) as f64 / 1e6),
        ..IntakeStatus::default()
    };
    if !statements.table.tracked {
        return Ok(counted);
    }
    let sql = "select count(*) filter (where r.state in ('taken', 'dead')), count(*) filter (where r.state = 'dead'),
                      count(*) filter (where r.state = 'refused'), count(*) filter (where r.state = 'unclear'), count(*) filter (where r.state = 'unmarked')
                 from postroom.intake_rows r where r.intake = $1";
    let row = tx.query_one(sql, &[&intake.name]).await.map_err(failed)?;
    let count = |index: usize| row.try_get::<_, i64>(index).map_err(failed);
    let sql = "select r.row_key, r.state, r.id::text, coalesce(r.error, ''), extract(epoch from clock_timestamp() - r.at)::float8
                 from postroom.intake_rows r where r.intake = $1 and r.state in ('refused', 'unclear', 'unmarked') order by r.at desc limit $2";
    let aside = tx.query(sql, &[&intake.name, &ASIDE_SHOWN]).await.map_err(failed)?;
    let set_aside = aside.iter().map(|row| {
        Ok(SetAside {
            row: shown(row, 0)?,
            state: row.try_get(1)?,
            id: row.try_get(2)?,
            error: shown(row, 3)?,
            age_seconds: row.try_get(4)?,
        })
    });
    Ok(IntakeStatus {
        taken: count(0)?,
        dead: count(1)?,
        refused: count(2)?,
        unclear: count(3)?,
        unmarked: count(4)?,
        set_aside: set_aside.collect::<Result<_, tokio_postgres::Error>>().map_err(failed)?,
        ..counted
    })
}

pub(crate) async fn again(
    connector: &Connector,
    intake: &Intake,
    row: Option<&str>,
    deed: &Deed,
) -> Result<u64, StoreError> {
    let failed = |error| table_error("let rows be taken again; nothing was changed", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = self::deed(&mut session).await?;
    let statements = statements(&tx, intake).await?;
    // Nobody may take them meanwhile.
    tx.query_opt("select from postroom.intakes i where i.name = $1 for update", &[&intake.name])
        .await
        .map_err(failed)?;
    let sql = "update postroom.intake_rows r set state = 'taken', error = null
                where r.intake = $1 and (r.row_key = $2 or $2::text is null) and r.state = 'unmarked'";
    let unmarked = tx.execute(sql, &[&intake.name, &row]).await.map_err(failed)?;
    let sql = "delete from postroom.intake_rows r
                where r.intake = $1 and (r.row_key = $2 or ($2::text is null and r.state = 'refused')) and r.state in ('refused', 'unclear', 'discarded')
               returning r.row_key, r.id::text";
    let gone = tx.query(sql, &[&intake.name, &row]).await.map_err(failed)?;
    let rows = gone.iter().map(|row| row.try_get(0)).collect::<Result<Vec<String>, _>>().map_err(failed)?;
    let ids = gone.iter().map(|row| row.try_get(1)).collect::<Result<Vec<Option<String>>, _>>().map_err(failed)?;
    let back: Vec<(String, Setting)> =
        intake.pending.iter().filter_map(|(name, values)| Some((name.clone(), values.first()?.setting()?))).collect();
    set(&tx, &statements, &back, &rows, &[]).await.map_err(failed)?;
    if unmarked > 0 || !rows.is_empty() {
        let ids: Vec<&str> = ids.iter().flatten().map(String::as_str).collect();
        let filter = serde_json::json!({ "intake": intake.name, "rows": rows }).to_string();
        audit(&tx, deed, "intake.again", &filter, &ids).await.map_err(failed)?;
    }
    tx.commit().await.map_err(failed)?;
    Ok(rows.len() as u64 + unmarked)
}

pub(crate) async fn check(connector: &Connector, intake: &Intake) -> Result<Vec<Finding>, StoreError> {
    let failed = |error| store_error("look at a table", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let named = format!("intake {}, table {}", intake.name, intake.table);
    let Some(table) = Table::read(&tx, intake).await.map_err(failed)? else {
        let advice = "name it as schema.table; without a schema it is looked for in public";
        return Ok(vec![Finding::bad(format!("{named}: there is no such table"), advice)]);
    };
    if !matches!(table.kind.as_str(), "r" | "p") {
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
    // Each statement is planned, which also tries its values and the rights; the first that fails ends the transaction.
    let none: Vec<String> = Vec::new();
    let mut tried: Vec<(&str, String, Vec<&(dyn ToSql + Sync)>)> = Vec::new();
    let one = 1_i64;
    let pending = parameters(&intake.name, &one, &statements.pending_values);
    tried.push(("pending", statements.next_free(), pending));
    let settings = |done: &Done| if let Done::Set(settings) = done { settings.clone() } else { Vec::new() };
    let sets = [("taken", intake.taken.clone()), ("sent", settings(&intake.sent)), ("dead", intake.dead.clone())];
    let sets: Vec<(&str, (String, Vec<String>))> = sets
        .iter()
        .filter(|(_, settings)| !settings.is_empty())
        .map(|(place, settings)| (*place, statements.set(settings)))
        .collect();
    for (place, (sql, values)) in &sets {
        tried.push((place, sql.clone(), parameters(&none, &none, values)));
    }
    if intake.sent == Done::Delete {
        tried.push(("sent", statements.delete(), vec![&none]));
    }
    for (place, sql, values) in tried {
        if let Err(error) = tx.query(&format!("explain {sql}"), &values).await {
            let Some(told) = error.as_db_error() else { return Err(failed(error)) };
            let advice =
                "change [[intake]] in the configuration, or grant the role select, update and delete on the table";
            return Ok(vec![Finding::bad(format!("{named}: {place}: {}", told.message()), advice)]);
        }
    }
    drop(tx);
    if let Some(bad) = trial::tried(&mut session, intake, &statements, &named).await? {
        return Ok(vec![bad]);
    }
    let mut findings = vec![Finding::good(format!("{named}: its columns, values and rights are there"))];
    if let Some(why) = intake.without_index(&statements.table.shape, &statements.row) {
        let advice = "create an index on the columns of `pending` and `order`, and no others: an index with the payload in it refuses large rows";
        findings.push(Finding::bad(format!("{named}: {why}"), advice));
    }
    Ok(findings)
}

pub(crate) async fn tables_with(connector: &Connector, columns: &[String]) -> Result<Vec<FoundTable>, StoreError> {
    let failed = |error| store_error("look for tables", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let sql = "select n.nspname::text, c.relname::text, array_agg(a.attname::text order by a.attnum),
                      array_agg(pg_catalog.format_type(a.atttypid, a.atttypmod) order by a.attnum)
                 from pg_catalog.pg_class c
                 join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                 join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                where c.relkind in ('r', 'p') and n.nspname not in ('pg_catalog', 'information_schema', 'postroom')
                  and pg_catalog.has_table_privilege(c.oid, 'select')
                group by n.nspname, c.relname
               having array_agg(a.attname::text) @> $1::text[]
                order by 1, 2";
    let rows = tx.query(sql, &[&columns]).await.map_err(failed)?;
    let found = rows.iter().map(|row| {
        let (names, types): (Vec<String>, Vec<String>) = (row.try_get(2)?, row.try_get(3)?);
        Ok(FoundTable {
            table: TableName { schema: Some(row.try_get(0)?), name: row.try_get(1)? },
            columns: names.into_iter().zip(types).collect(),
        })
    });
    found.collect::<Result<_, tokio_postgres::Error>>().map_err(failed)
}
