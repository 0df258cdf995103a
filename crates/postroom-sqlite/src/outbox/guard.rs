//! Business statements with a guard: the right number of rows, or an error that says which key was taken.

use postroom::{GuardError, expect_rows};
use rusqlite::{Params, Transaction, ffi};

use crate::Sqlite;

impl Sqlite {
    /// Executes a business statement that must change exactly `rows` rows. After any error, drop the
    /// transaction, which rolls back everything in it, the messages too.
    pub fn execute_guarded_blocking(
        &self,
        tx: &Transaction<'_>,
        what: &'static str,
        rows: u64,
        sql: &str,
        parameters: impl Params,
    ) -> Result<(), GuardError> {
        match tx.execute(sql, parameters) {
            Ok(changed) => expect_rows(what, rows, changed as u64),
            Err(error) if is_taken(&error) => {
                let text = error.to_string();
                let constraint = text.split_once("failed: ").map_or(text.as_str(), |(_, columns)| columns).to_owned();
                Err(GuardError::Conflict { what, constraint, source: error.into() })
            }
            Err(error) => Err(GuardError::Store { what, source: error.into() }),
        }
    }
}

fn is_taken(error: &rusqlite::Error) -> bool {
    let codes = [ffi::SQLITE_CONSTRAINT_UNIQUE, ffi::SQLITE_CONSTRAINT_PRIMARYKEY];
    matches!(error, rusqlite::Error::SqliteFailure(failure, _) if codes.contains(&failure.extended_code))
}
