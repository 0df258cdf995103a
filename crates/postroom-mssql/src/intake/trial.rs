//! Changes that are tried on rows that wait, and rolled back.

use postroom::{Finding, Intake, IntakeRow, Setting, Trial};
use tiberius::error::Error;

use super::table::Statements;
use super::{change, now_us, rows, tried as in_savepoint, whole};
use crate::conn::Conn;

/// What no row takes; none: nothing is known to be wrong. The transaction is rolled back by the caller.
pub(super) async fn tried(
    tx: &mut Conn,
    intake: &Intake,
    statements: &Statements,
    named: &str,
) -> Result<Option<Finding>, Error> {
    let many = i64::try_from(Trial::ROWS).unwrap_or(i64::MAX);
    let next = rows(tx, statements.next_keys(&intake.name, many)).await?;
    let next = next.iter().map(|row| statements.keys_of(row)).collect::<Result<Vec<_>, _>>()?;
    let next: Vec<IntakeRow> = next.into_iter().map(|(row, _)| row).collect();
    if next.is_empty() {
        return Ok(None);
    }
    let free = whole(tx, statements, statements.free(&next)).await?;
    let now = now_us(tx).await?;
    if let Some(bad) = intake.none_is_a_message(named, &free, now) {
        return Ok(Some(bad));
    }
    for trial in intake.trials() {
        let mut refused = None;
        for row in &free {
            refused = refuses(tx, statements, &trial, &row.row).await?;
            if refused.is_none() {
                break;
            }
        }
        if let Some(told) = refused {
            return Ok(Some(trial.refused(named, free.len(), &told)));
        }
    }
    Ok(None)
}

/// Why this row does not take it.
async fn refuses(tx: &mut Conn, statements: &Statements, trial: &Trial, row: &str) -> Result<Option<String>, Error> {
    let keys = [row.to_owned()];
    let refused = in_savepoint(tx, async |tx| {
        for step in &trial.steps {
            let error = step.iter().any(|(_, setting)| *setting == Setting::Error).then_some(Trial::ERROR);
            change(tx, statements.set(step, &keys, error)).await?;
        }
        Ok(())
    });
    let refused = refused.await?.err();
    if refused.is_none() {
        tx.batch("rollback transaction postroom_rows").await?;
    }
    Ok(refused)
}
