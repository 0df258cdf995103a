//! Changes that are tried on rows that wait, and rolled back.

use postroom::{Finding, Intake, IntakeRow, Trial};
use rusqlite::{Connection, Error, TransactionBehavior, params_from_iter};

use super::table::Statements;
use super::{is_of_row, now_us, set};

/// What no row takes; none: nothing is known to be wrong.
pub(super) fn tried(
    connection: &mut Connection,
    intake: &Intake,
    statements: &Statements,
    named: &str,
) -> Result<Option<Finding>, Error> {
    let many = i64::try_from(Trial::ROWS).unwrap_or(i64::MAX);
    let (sql, values) = statements.next(&intake.name, many);
    let rows: Vec<IntakeRow> = connection
        .prepare(&sql)?
        .query_map(params_from_iter(values), |row| statements.whole(row))?
        .collect::<Result<_, _>>()?;
    if rows.is_empty() {
        return Ok(None);
    }
    if let Some(bad) = intake.none_is_a_message(named, &rows, now_us(connection)?) {
        return Ok(Some(bad));
    }
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for trial in intake.trials() {
        let mut refused = None;
        for row in &rows {
            tx.execute_batch("savepoint postroom_trial")?;
            let done = trial.steps.iter().try_for_each(|step| set(&tx, statements, step, &row.row, Some(Trial::ERROR)));
            tx.execute_batch("rollback to postroom_trial; release postroom_trial")?;
            refused = match done {
                Ok(()) => None,
                Err(error) if is_of_row(&error) => Some(error.to_string()),
                Err(error) => return Err(error),
            };
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
