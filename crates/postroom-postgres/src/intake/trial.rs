//! Changes that are tried on rows that wait, and rolled back.

use postroom::{Finding, Intake, IntakeRow, StoreError, Trial};
use tokio_postgres::Transaction;

use super::table::{Statements, quoted};
use super::{UNCHANGED, deed, now_us, of_row, parameters, set, table_error};
use crate::link::store_error;
use crate::operate::OperatorSession;

/// What no row takes; none: nothing is known to be wrong.
pub(super) async fn tried(
    session: &mut OperatorSession,
    intake: &Intake,
    statements: &Statements,
    named: &str,
) -> Result<Option<Finding>, StoreError> {
    let mut tx = deed(session).await?;
    let bad = match states(&tx, intake, statements, named).await? {
        Some(bad) => Some(bad),
        None => refused_by_all(&mut tx, intake, statements, named).await?,
    };
    // Not by dropping it, which would keep the rows locked a moment longer.
    tx.rollback().await.map_err(|error| store_error("roll a trial back", error))?;
    Ok(bad)
}

async fn refused_by_all(
    tx: &mut Transaction<'_>,
    intake: &Intake,
    statements: &Statements,
    named: &str,
) -> Result<Option<Finding>, StoreError> {
    let failed = |error| table_error("try changes of rows; nothing was changed", error);
    let many = i64::try_from(Trial::ROWS).unwrap_or(i64::MAX);
    let values = parameters(&intake.name, &many, &statements.pending_values);
    let rows = tx.query(&statements.next_free(), &values).await.map_err(failed)?;
    let rows: Vec<IntakeRow> =
        rows.iter().map(|row| statements.whole(row)).collect::<Result<_, _>>().map_err(failed)?;
    let now = now_us(tx).await.map_err(failed)?;
    if let Some(bad) = intake.none_is_a_message(named, &rows, now) {
        return Ok(Some(bad));
    }
    for trial in intake.trials() {
        let mut refused = None;
        for row in &rows {
            refused = refuses(tx, statements, &trial, &row.row).await.map_err(failed)?;
            if refused.is_none() {
                break;
            }
        }
        if let Some(told) = refused {
            return Ok(Some(trial.refused(named, rows.len(), &told)));
        }
    }
    Ok(None)
}

/// Why this row does not take it.
async fn refuses(
    tx: &mut Transaction<'_>,
    statements: &Statements,
    trial: &Trial,
    row: &str,
) -> Result<Option<String>, tokio_postgres::Error> {
    let point = tx.savepoint("postroom_trial").await?;
    let (rows, mut refused) = ([row.to_owned()], None);
    for step in &trial.steps {
        refused = match set(&point, statements, step, &rows, &[Trial::ERROR]).await {
            Ok(1..) => continue,
            Ok(0) => Some(UNCHANGED.to_owned()),
            Err(error) => refusal(error)?,
        };
        break;
    }
    point.rollback().await?;
    Ok(refused)
}

/// What the database says to a change, if it is about the change: an error of a trigger, a constraint, a value. None: it could not be tried now,
/// because others have what it needs.
fn refusal(error: tokio_postgres::Error) -> Result<Option<String>, tokio_postgres::Error> {
    match (of_row(&error), error.as_db_error().map(|told| (told.code().code().to_owned(), told.message().to_owned()))) {
        (Some(told), _) => Ok(Some(told)),
        // Waiting for a lock, a deadlock, a statement that took too long.
        (None, Some((code, _))) if ["40", "55", "57"].iter().any(|class| code.starts_with(class)) => Ok(None),
        (None, Some((_, told))) => Ok(Some(told)),
        (None, None) => Err(error),
    }
}

/// A value of `pending` that a constraint of its column alone excludes.
async fn states(
    tx: &Transaction<'_>,
    intake: &Intake,
    statements: &Statements,
    named: &str,
) -> Result<Option<Finding>, StoreError> {
    let failed = |error| store_error("look at a table's constraints", error);
    let sql = "select a.attname::text, c.conname::text, pg_catalog.pg_get_expr(c.conbin, c.conrelid)
                 from pg_catalog.pg_constraint c
                 join pg_catalog.pg_attribute a on a.attrelid = c.conrelid and a.attnum = c.conkey[1]
                where c.conrelid = $1::text::regclass and c.contype = 'c' and cardinality(c.conkey) = 1";
    let rows = tx.query(sql, &[&statements.table.name]).await.map_err(failed)?;
    for row in &rows {
        let (column, constraint, condition): (String, String, String) =
            (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?, row.try_get(2).map_err(failed)?);
        let of = statements.table.shape.column(&column).map_or("text", |column| column.type_name.as_str());
        for (_, value) in intake.states().filter(|(name, _)| *name == column) {
            let sql =
                format!("select coalesce({condition}, true) from (select $1::text::{of} as {}) f", quoted(&column));
            let holds: bool = tx.query_one(&sql, &[&value]).await.map_err(failed)?.try_get(0).map_err(failed)?;
            if !holds {
                let why = format!("constraint {constraint} excludes it");
                return Ok(Some(Intake::no_such_state(named, &column, value, &why)));
            }
        }
    }
    Ok(None)
}
