//! Business statements with a guard: the right number of rows, or an error that says which key was taken.

use postroom::{GuardError, expect_rows};
use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;

use crate::Postgres;

impl Postgres {
    /// Executes a business statement that must change exactly `rows` rows. After any error, drop the
    /// transaction, which rolls back everything in it, the messages too.
    pub async fn execute_guarded(
        &self,
        tx: &Transaction<'_>,
        what: &'static str,
        rows: u64,
        sql: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<(), GuardError> {
        match tx.execute(sql, parameters).await {
            Ok(changed) => expect_rows(what, rows, changed),
            Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
                let constraint =
                    error.as_db_error().and_then(|db| db.constraint()).unwrap_or("a unique key").to_owned();
                Err(GuardError::Conflict { what, constraint, source: error.into() })
            }
            Err(error) => Err(GuardError::Store { what, source: error.into() }),
        }
    }
}
